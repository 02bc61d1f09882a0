"""One rollout server of a run: its lease, its identity, pushes to it, and what a failed request means."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import httpx

from swift_r1.errors import RunFailed, ServerUnreachable, SwiftError, UsageError
from swift_r1.flags.server import LOOPBACK
from swift_r1.record.spans import Spans, Stopwatch
from swift_r1.sync.transport import AUTO, IPC, SHM, own_gpu
from swift_r1.sync.writer import Bucket, Link, WeightWriter
from swift_r1.wire.client import ReadImage, why_no_answer
from swift_r1.wire.protocol import (
    NOT_NOW,
    AdapterConfig,
    RolloutOutput,
    RolloutRequest,
    ServerInfo,
    ServerRefused,
)

logger = logging.getLogger(__name__)

_CONFLICT = 409
_MAX_LOSSES = 5
_MAX_REFUSALS = 2  # of weights: one full push repairs them, or nothing does
_ALIKE = (
    "model",
    "tokenizer_hash",
    "vocab_size",
    "dtype",
    "max_model_len",
    "max_lora_rank",
    "max_images",
    "engine_version",
    "turns",
)

LogProbs = Sequence[Sequence[float]]


class OtherWeights(RunFailed):
    """A completion was not made by the weights that were published."""


class GoneAgain(ServerUnreachable):
    """The server went away again and again, with no success in between."""


class RefusedAgain(RunFailed):
    """The server refused again and again, with no success in between."""


GIVEN_UP = (GoneAgain, RefusedAgain)


class ServerLost(Exception):
    """The server went away, or holds no whole version: wait for it, and bring it up to date."""


def why_not_alike(servers: Sequence[tuple[str, ServerInfo]]) -> str | None:
    """Returns in one line what keeps servers, each with its URL, from being used together."""
    seen: dict[str, str] = {}
    for url, info in servers:
        if info.instance in seen:
            return f"{seen[info.instance]} and {url} are the same rollout server: name each once"
        seen[info.instance] = url
    (first_url, first), *others = servers
    for url, info in others:
        for name in _ALIKE:
            one = getattr(first, name)
            other = getattr(info, name)
            if one == other:
                continue
            if name == "tokenizer_hash":
                return f"the rollout servers at {first_url} and {url} have different tokenizers: start them alike"
            return f"the rollout server at {first_url} has {name} {one}, that at {url} {other}: start them alike"
    return None


@dataclass(frozen=True, slots=True)
class Expected:
    """The properties that a server needs to serve this run.

    `max_tokens` are `--max_length` and `--max_completion_length` together, None where prompts have no limit;
    `completions` are the most that are asked for of one prompt; with `routes` it is asked for the experts of tokens.
    """

    model: str
    tokenizer_hash: str
    vocab_size: int
    max_tokens: int | None
    completions: int = 1
    routes: bool = False
    batch_invariant: bool = False  # `--batch_invariant`

    def fault(self, info: ServerInfo) -> str | None:
        """Why the server cannot serve this run at all."""
        if info.max_n < self.completions:
            return (
                f"the rollout server gives at most {info.max_n} completions of a prompt, and this run asks for "
                f"{self.completions}: start it with a higher --max_pending_requests, or give fewer --num_generations"
            )
        if self.routes and not info.routes:
            return (
                "the rollout server does not tell which experts it chooses (--router_replay_mode R3): start it with "
                """--vllm_engine_kwargs '{"enable_return_routed_experts": true}', which vLLM takes on a GPU"""
            )
        if self.batch_invariant and not info.batch_invariant:
            return (
                "--batch_invariant true: the rollout server does not compute so: start it with --batch_invariant true, on "
                "a GPU"
            )
        if info.tokenizer_hash == self.tokenizer_hash and info.vocab_size == self.vocab_size:
            return None
        return another_model(info.model, self.model)


def another_model(served: str, own: str) -> str:
    """Says that a server's model cannot take the weights of the run's own."""
    return (
        f"the rollout server serves {served}, whose tokenizer or vocabulary is not that of --model {own}: "
        f"start it with `swift rollout --model {own}`"
    )


class ServerSession:
    """A run's relation to one server, which it waits for `timeout_s` seconds at most, at the start and after each loss.

    Args:
        first: its info, where that is known; else the server is waited for here. Of a `newcomer`, which is waited for
            in `wait_until_back`, the info of a server that it must be like.

    Raises:
        ServerUnreachable: no server within `timeout_s`.
        UsageError: the server is not for this run.
    """

    def __init__(
        self,
        writer: WeightWriter,
        expected: Expected,
        timeout_s: float,
        transport: str = AUTO,
        first: ServerInfo | None = None,
        newcomer: bool = False,
    ) -> None:
        self.writer = writer
        self.client = writer.client
        self.url = writer.client.base_url
        self._expected = expected
        self._timeout_s = timeout_s
        self._transport = transport
        self._name = f"the rollout server at {self.url}"
        self.first = first or self.client.wait_until_ready(timeout_s, or_asleep=True)
        fault = None if newcomer else expected.fault(self.first)
        if fault is not None:
            raise UsageError(fault)
        if (
            not newcomer
            and expected.max_tokens is not None
            and self.first.max_model_len < expected.max_tokens
        ):
            logger.warning(
                "%s takes %d tokens, less than --max_length and --max_completion_length together (%d)",
                *(self._name, self.first.max_model_len, expected.max_tokens),
            )
        # Not where completions go on over an update: this one would have them end first.
        self.shares_gpu = (
            transport == AUTO
            and writer.policy != "keep"
            and self.first.gpu == own_gpu() is not None
        )
        self._instance = None if newcomer else self.first.instance  # None: it has not been met
        self._holds_others = newcomer  # weights that may have the numbers of this run's
        self._lock = threading.Lock()
        self._losses = 0
        self._is_lost = False
        self.adapters = False  # alone are pushed
        self.record(Spans(), "")
        self._seconds = 0.0  # until answers came
        self._tokens = 0  # of the longest completion of each

    @property
    def info(self) -> ServerInfo:
        """The server's info, with its present instance."""
        return self.first.model_copy(update={"instance": self._instance or ""})

    def close(self) -> None:
        """Gives the lease back, and closes the connections; also more than once. Nothing may use it any more."""
        self.generating.flush()
        if self._instance is not None:
            self.writer.close()
        self.client.close()

    def record(self, spans: Spans, lane: str) -> None:
        """Writes from now on when it has requests, and when it gets weights, which may be at the same time."""
        self.generating = spans.busy(lane, "generate")
        self._stopwatch = Stopwatch(spans.lane(f"{lane}-weights"))

    @property
    def takes_files(self) -> bool:
        """Whether weights go through shared memory, as far as is known."""
        if self.writer.transport is not None:
            return self.writer.transport == SHM
        return self._transport in (AUTO, SHM) and self.is_on_loopback

    @property
    def is_on_loopback(self) -> bool:
        return httpx.URL(self.url).host in LOOPBACK

    def check(self, output: RolloutOutput, versions: Container[int]) -> None:
        """Raises OtherWeights for an answer that was not made by weights of these `versions`."""
        for completion in output.completions:
            others = [one for _, one in completion.version_spans if one not in versions]
            if completion.finish_reason == "abort" or others:
                raise OtherWeights(
                    f"the rollout server answered with weight version {(others or [completion.weight_version])[0]} "
                    f"({completion.finish_reason}), which was not published: another trainer may be writing to it"
                )
        self.gained()

    def paced(self, output: RolloutOutput, seconds: float) -> None:
        """Notes that an answer came after so many seconds; on the loop, as `take_pace`."""
        self._seconds += seconds
        self._tokens += max(len(completion.token_ids) for completion in output.completions)

    def take_pace(self) -> float:
        """Seconds a token since the last call, of requests that it has at the same time; 0 without an answer."""
        pace = self._seconds / self._tokens if self._tokens else 0.0
        self._seconds = 0.0
        self._tokens = 0
        return pace

    def judge(
        self, error: ServerUnreachable | OtherWeights | ServerRefused, writing: bool = False
    ) -> NoReturn:
        """Raises what a failure of this server means; with `writing` one of a call under the lease:

        no answer, or "not now" (503)                         ServerLost: what was answered by then counts
        weights refused, but not for the lease or the order   ServerLost: all of them are pushed again
        other weights, of a server that was started again     ServerLost
        other weights of the same one, any other refusal      the error, which ends the run
        lost again and again, with no success in between      GoneAgain or RefusedAgain: it is given up
        """
        if isinstance(error, OtherWeights):
            # A server that was replaced in an idle moment serves its base weights, and no connection broke.
            if not self._was_replaced():
                raise error
        elif isinstance(error, ServerRefused) and error.status != NOT_NOW:
            a_push_repairs_it = writing and error.status != _CONFLICT
            if not a_push_repairs_it:
                raise error
        self._lost(error)

    def update(
        self,
        version: int,
        buckets: Iterable[Bucket],
        adapter: AdapterConfig | None = None,
        lend: bool = False,
        link: Link | None = None,
    ) -> None:
        """Brings the server to `version`, with `lend` out of the memory of the GPU that it shares, with a `link` from
        another server; see `WeightWriter.push`. Raises ServerLost where all is to be pushed again,
        ServerUnreachable where it was lost again and again, and RunFailed where another trainer writes to it, or it
        refused the weights again and again."""
        self.adapters = adapter is not None
        with self._stopwatch.timed("sync"):
            transport = IPC if lend else self._transport
            self._write(
                lambda: self.writer.push(version, buckets, transport, adapter, link), version
            )
        self._holds_others = False

    def sleep(self, level: int) -> None:
        """Its engine gives its memory back until `wake`; raises as `push`."""
        self._write(lambda: self.writer.sleep(level))

    def wake(self) -> None:
        """Its engine has all its memory again; raises as `push`."""
        self._write(self.writer.wake)

    def _write(self, work: Callable[[], object], version: int | None = None) -> None:
        """Does `work` under the lease, which is taken again where it was lost in a silence. Raises as `judge`."""
        try:
            if self.client.info().instance != self._instance:
                raise ServerUnreachable(f"{self._name} was replaced")
            try:
                work()
            except ServerRefused as refused:
                if refused.status != _CONFLICT:
                    raise
                # The update is lost with the lease. `take` refuses where another trainer has it.
                self.writer.take()
                info = self.client.info()
                if (
                    info.instance == self._instance
                    and version is not None
                    and info.weight_version >= version
                ):
                    raise
                raise ServerUnreachable(
                    f"{refused}; the lease on its weights is taken again"
                ) from refused
        except (ServerUnreachable, ServerRefused) as error:
            self.judge(error, writing=True)

    def gained(self) -> None:
        """It has answered, or serves a new version: earlier losses no longer count."""
        with self._lock:
            self._losses = 0
            self._is_lost = False

    def score(self, sequences: Sequence[Sequence[int]], versions: Container[int]) -> list[LogProbs]:
        """Log-probs of given tokens under weights of these `versions`, at temperature 1, of each copy of the model.
        Raises as `judge`, and ServerLost where it holds other weights by now."""
        try:
            answer = self.client.score(sequences)
        except (ServerUnreachable, ServerRefused) as error:
            self.judge(error)
        if answer.weight_version not in versions:
            self._lost(
                OtherWeights(
                    f"{self._name} holds weight version {answer.weight_version}, not this run's"
                )
            )
        return [answer.logprobs, *answer.copies]

    def answer(
        self, request: RolloutRequest, read_image: ReadImage, versions: Container[int]
    ) -> RolloutOutput:
        """The completions of one request, by weights of these `versions`. Raises as `judge`."""
        try:
            [output] = self.client.generate([request], read_image=read_image)
            self.check(output, versions)
        except (ServerUnreachable, ServerRefused, OtherWeights) as error:
            self.judge(error)
        return output

    def wait_until_back(
        self,
        versions: Collection[int],
        report: Callable[[str], None],
        check_wanted: Callable[[], None] = lambda: None,
        members: Callable[[], Sequence[tuple[str, ServerInfo]]] = lambda: (),
    ) -> int | None:
        """Waits for the server, at most `timeout_s`; see `RolloutClient.wait`. Returns the number under which it must
        get the weights, above its own; None where it holds one of `versions`, the run's current weights. A newcomer's
        lease is taken. `check_wanted` is called again and again; what it raises ends the wait.

        Raises:
            ServerUnreachable: no server for this run came back in time.
            ServerLost: it slept, and went away while it was woken.
            UsageError: a newcomer is not for this run, is not like its `members`, or another trainer writes to it.
        """

        def wants_push(info: ServerInfo) -> bool:
            if info.broken is not None or info.instance != self._instance or self._holds_others:
                return True
            return info.weight_version not in versions

        def look() -> ServerInfo | str:
            check_wanted()
            try:
                info = self.client.info()
            except ServerUnreachable as error:
                return f"no answer ({why_no_answer(error)})"
            except RunFailed as error:
                return str(error)
            if self._instance is None:
                why = why_not_alike([*members(), (self.url, info)]) or self._why_not_this(info)
                if why is not None:
                    raise UsageError(why)
            else:
                why = self._why_not_this(info)
                if why is not None:
                    return why
            return info if wants_push(info) or info.asleep else self.client.why_not_ready() or info

        info = self.client.wait(self._timeout_s, look, report)
        with self._lock:
            self._is_lost = False
        if self._instance is None:
            self.writer.hold(self._timeout_s, report)
            self._instance = info.instance
        if info.asleep:  # never one that was started again
            self.wake()
        if not wants_push(info):
            logger.info(
                "%s answers again and holds weight version %d", self._name, info.weight_version
            )
            return None
        again = "is the same one" if info.instance == self._instance else "was started again"
        again = "is there" if self._holds_others else again
        self._instance = info.instance
        target = max(*versions, info.weight_version + 1)
        logger.info(
            "%s %s and holds weight version %d%s: pushing version %d",
            *(
                self._name,
                again,
                info.weight_version,
                " (not whole)" if info.broken else "",
                target,
            ),
        )
        return target

    def _why_not_this(self, info: ServerInfo) -> str | None:
        """A server that came back must match the original: same model, tokenizer, and room for every completion. So
        must a newcomer that of the others."""
        if info.model != self.first.model:
            return f"it serves {info.model} now, and served {self.first.model} before"
        if info.dtype != self.first.dtype:
            return f"it computes in {info.dtype} now, and did in {self.first.dtype} before (--torch_dtype)"
        if self.adapters and not info.own_base:
            return "it holds whole weights that another run has pushed, and adapters need its own: start it again"
        now = info.max_lora_rank or 0
        before = self.first.max_lora_rank or 0
        if now != before:
            return f"it takes adapters up to rank {now} now, and did up to {before} before (--vllm_enable_lora)"
        if info.max_images < self.first.max_images:
            return (
                f"it takes {info.max_images} images of a prompt now, and did take {self.first.max_images} before "
                "(--vllm_limit_mm_per_prompt)"
            )
        needed = min(
            self._expected.max_tokens or self.first.max_model_len, self.first.max_model_len
        )
        if info.max_model_len < needed:
            return f"it takes only {info.max_model_len} tokens now (--max_model_len), this run needs {needed}"
        return self._expected.fault(info)

    def _was_replaced(self) -> bool:
        try:
            return self.client.info().instance != self._instance
        except (ServerUnreachable, ServerRefused) as error:
            logger.info(
                "no answer from the rollout server after it answered with other weights: %s", error
            )
            return True

    def _lost(self, error: SwiftError) -> NoReturn:
        with self._lock:
            # All requests that wait for one server lose it at once: that is one loss.
            self._losses += not self._is_lost
            self._is_lost = True
        refused = isinstance(error, ServerRefused) and error.status != NOT_NOW
        if self._losses >= (_MAX_REFUSALS if refused else _MAX_LOSSES):
            kind = GoneAgain if isinstance(error, ServerUnreachable) else RefusedAgain
            raise kind(
                f"{error} (lost {self._losses} times in a row, with no success in between)"
            ) from error
        logger.warning("%s; waiting up to %g s for it", error, self._timeout_s)
        raise ServerLost from error
