"""The trainer's hold on its rollout server: a server that dies or is replaced is waited for and brought up to date.

Only the main rank has a link; what all ranks must do together is in `swift_r1.sampling.remote`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from swift_r1.errors import RunFailed, ServerUnreachable, SwiftError, UsageError
from swift_r1.sampling.pool.client import RolloutClient
from swift_r1.weights.transport import AUTO, NCCL
from swift_r1.weights.writer import Bucket, WeightWriter
from swift_r1.wire.http_errors import NOT_NOW, ServerRefused
from swift_r1.wire.protocol import AdapterConfig, RolloutOutput, RolloutRequest, ServerInfo

logger = logging.getLogger("swift_r1.sampling.pool.session")

_CONFLICT = 409
_MAX_LOSSES = 5
_MAX_REFUSALS = 2  # of weights: repaired by one full push, or it never will be


class OtherWeights(RunFailed):
    """A completion was not made by the weights that were published."""


class GoneAgain(ServerUnreachable):
    """The server went away again and again, with nothing gained in between."""


class RefusedAgain(RunFailed):
    """The server was there, and refused again and again, with nothing gained in between."""


GIVEN_UP = (GoneAgain, RefusedAgain)


class ServerLost(Exception):
    """The server went away, or holds no whole version: `ServerLink.reconnect`, then try again."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a server must be to serve this run.

    Attributes:
        model: `--model`, for messages.
        max_tokens: `--max_length` and `--max_completion_length` together; None where prompts have no limit.
        completions: most that are asked for of one prompt.
    """

    model: str
    tokenizer_hash: str
    vocab_size: int
    max_tokens: int | None
    completions: int = 1

    def fault(self, info: ServerInfo) -> str | None:
        """Why the server cannot serve this run at all."""
        if info.max_n < self.completions:
            return (
                f"the rollout server gives at most {info.max_n} completions of a prompt, and this run asks for "
                f"{self.completions}: start it with a higher --max_pending_requests, or give fewer --num_generations"
            )
        if info.tokenizer_hash == self.tokenizer_hash and info.vocab_size == self.vocab_size:
            return None
        return (
            f"the rollout server serves {info.model}, whose tokenizer or vocabulary is not that of --model "
            f"{self.model}: start it with `swift rollout --model {self.model}`"
        )


class ServerLink:
    """Asks, pushes, and finds a lost server again.

    Args:
        timeout_s: longest wait for the server, at the start and after each loss (`--vllm_server_timeout`).
        transport: `--weight_transport`.
        writer: holds the lease on the weights already; None: one that does so until `close`.
        name: of the server in messages.

    Attributes:
        first: what the server said of itself at first.
        refused: answers of other weights than those asked for, which were not taken.
        by_nccl: whether weights go from device to device.

    Raises:
        ServerUnreachable: no server within `timeout_s`.
        UsageError: the server is not for this run, or another trainer writes to it.
    """

    def __init__(
        self,
        client: RolloutClient,
        expected: Expected,
        timeout_s: float,
        transport: str = AUTO,
        writer: WeightWriter | None = None,
        name: str = "the rollout server",
    ) -> None:
        self._client, self._expected, self._timeout_s, self._transport = client, expected, timeout_s, transport
        self._name = name
        self.first = client.wait_until_ready(timeout_s, or_asleep=True)
        if (fault := expected.fault(self.first)) is not None:
            raise UsageError(fault)
        if expected.max_tokens is not None and self.first.max_model_len < expected.max_tokens:
            logger.warning(
                "%s takes %d tokens, less than --max_length and --max_completion_length together (%d)",
                *(self._name, self.first.max_model_len, expected.max_tokens),
            )
        self.by_nccl = transport == NCCL
        self._writer = writer or WeightWriter(client)
        if writer is None:
            self._writer.hold(timeout_s)
        self._instance = self.first.instance
        self._lock = threading.Lock()
        self._losses, self._is_lost = 0, False
        self._counted = self._writer.sent_bytes
        self._adapters = False
        self.refused = 0

    def close(self) -> None:
        self._writer.close()

    @property
    def transport(self) -> str | None:
        """How weights went the last time."""
        return self._writer.transport

    def take_bytes(self) -> int:
        """Bytes of weights sent since the last call."""
        sent, self._counted = self._writer.sent_bytes - self._counted, self._writer.sent_bytes
        return sent

    def take_servers(self) -> int:
        """How many servers take work."""
        return 1

    def ask(
        self,
        requests: Sequence[RolloutRequest],
        versions: Container[int],
        on_answer: Callable[[RolloutOutput], None],
        while_waiting: Callable[[], None],
    ) -> None:
        """Completions of all requests by weights of these `versions`; each output goes to `on_answer` as it comes.

        Threads may ask at the same time, also while another one pushes.

        Raises:
            ServerLost: what was answered by then has been handed over.
            ServerUnreachable: lost again and again without one answer.
            RunFailed: the server refused a request, or answered with other weights.
        """

        def take(output: RolloutOutput) -> None:
            self.check(output, versions)
            on_answer(output)

        try:
            self._client.generate(requests, take, while_waiting)
        except (ServerUnreachable, OtherWeights, ServerRefused) as error:
            self.judge(error)

    def check(self, output: RolloutOutput, versions: Container[int]) -> None:
        """Takes an answer for what it is worth.

        Raises:
            OtherWeights: it was not made by weights of these `versions`.
        """
        _check_versions(output, versions)
        self._found()

    def judge(self, error: ServerUnreachable | OtherWeights | ServerRefused) -> NoReturn:
        """What a failed request means; raises as `ask` does."""
        if isinstance(error, OtherWeights):
            self.refused += 1
            # A server that was replaced in an idle moment serves its base weights, and no connection broke.
            if not self._was_replaced():
                raise error
        elif isinstance(error, ServerRefused) and error.status != NOT_NOW:
            raise error
        self._lost(error)

    def push(
        self,
        version: int,
        buckets: Iterable[Bucket],
        adapter: AdapterConfig | None = None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Brings the server to `version`; see `WeightWriter.push`.

        Raises:
            ServerLost: it went away meanwhile, did not take the weights whole, or took the lease back: push all again.
            ServerUnreachable: lost again and again.
            RunFailed: another trainer writes to it, or it refused the weights again and again.
        """
        self._adapters = adapter is not None
        self._as_its_writer(
            lambda: self._writer.push(version, buckets, self._transport, adapter, while_waiting), version
        )

    def sleep(self, level: int) -> None:
        """Its engine gives its memory back until `wake`; raises as `push`."""
        self._as_its_writer(lambda: self._writer.sleep(level))

    def wake(self) -> None:
        """Its engine has all its memory again; raises as `push`."""
        self._as_its_writer(self._writer.wake)

    def _as_its_writer(self, work: Callable[[], object], version: int | None = None) -> None:
        try:
            if self._client.info().instance != self._instance:
                raise ServerUnreachable(f"{self._name} was replaced")
            try:
                work()
            except ServerRefused as refused:
                if refused.status != _CONFLICT:
                    raise
                # Whoever was silent for longer than the lease lasts has lost it, and the update with it. Another's
                # lease, or a version of another's, is refused here.
                self._writer.take()
                info = self._client.info()
                if info.instance == self._instance and version is not None and info.weight_version >= version:
                    raise
                raise ServerUnreachable(f"{refused}; the lease on its weights is taken again") from refused
        except ServerUnreachable as error:
            self._lost(error)
        except ServerRefused as error:
            if error.status == _CONFLICT:
                raise
            self._lost(error)

    def pushed(self) -> None:
        """A new version is served: whatever was lost before was worth waiting for."""
        self._found()

    def answers_again(self, versions: Container[int]) -> bool:
        """Whether a server that was lost is still the one that it was, ready, and holds one of `versions`: then there
        is nothing to restore. Does not wait for it."""
        try:
            info = self._client.info()
            same = info.instance == self._instance and info.broken is None and info.weight_version in versions
            if not same or self._client.why_not_ready() is not None:
                return False
        except (ServerUnreachable, RunFailed):
            return False
        with self._lock:
            self._is_lost = False
        return True

    def farthest(
        self, sequences: Sequence[Sequence[int]], version: int, differs: Callable[[Sequence[Sequence[float]]], float]
    ) -> float:
        """The largest that `differs` says of an engine's log-probs; raises as `score` does."""
        # What is not a number is the farthest.
        return max((differs(rows) for rows in self.score(sequences, version)), key=lambda one: (one != one, one))

    def score(self, sequences: Sequence[Sequence[int]], version: int) -> list[Sequence[Sequence[float]]]:
        """Log-probs of given tokens under weight `version`, at temperature 1, of each copy of the model there.

        Raises:
            ServerLost: it went away meanwhile, or holds other weights by now.
            ServerUnreachable: lost again and again.
            RunFailed: it refused the sequences.
        """
        try:
            answer = self._client.score(sequences)
        except ServerUnreachable as error:
            self._lost(error)
        except ServerRefused as error:
            if error.status != NOT_NOW:
                raise
            self._lost(error)
        if answer.weight_version != version:
            self._lost(OtherWeights(f"{self._name} holds weight version {answer.weight_version}, not {version}"))
        return [answer.logprobs, *answer.copies]

    def reconnect(
        self,
        version: int,
        while_waiting: Callable[[], None],
        report: Callable[[str], None] = logger.info,
        exactly: bool = False,
    ) -> int | None:
        """Waits for the server, at most `timeout_s`; a line every few seconds says why.

        Args:
            exactly: it must be brought to this version, since others have it: a server that is ahead is waited for as
                if it were not there.

        Returns:
            The version that it must be brought to, None where it holds `version` already.

        Raises:
            ServerUnreachable: no server for this run came back in time.
            ServerLost: it slept, and went away while it was woken.
        """

        def wants_push(info: ServerInfo) -> bool:
            return info.broken is not None or (info.instance, info.weight_version) != (self._instance, version)

        def fault(info: ServerInfo) -> str | None:
            if exactly and wants_push(info) and info.weight_version >= version:
                return f"it holds weight version {info.weight_version}, and this run is at {version}: start it anew"
            return self._why_not_this(info)

        def will_do(info: ServerInfo) -> bool:
            return wants_push(info) or info.asleep > 0

        info = self._client.wait_until_back(self._timeout_s, fault, will_do, report, while_waiting)
        with self._lock:
            self._is_lost = False
        if info.asleep:  # never a new one
            self.wake()
        if not wants_push(info):
            logger.info("%s answers again and holds weight version %d", self._name, version)
            return None
        again = "is the same one" if info.instance == self._instance else "was started anew"
        self._instance = info.instance
        target = max(version, info.weight_version + 1)
        logger.info(
            "%s %s and holds weight version %d%s: pushing version %d",
            *(self._name, again, info.weight_version, " (not whole)" if info.broken else "", target),
        )
        return target

    def _why_not_this(self, info: ServerInfo) -> str | None:
        """A server that came back must be as the first one: same model, tokenizer, and room for every completion."""
        if info.model != self.first.model:
            return f"it serves {info.model} now, and served {self.first.model} before"
        if info.dtype != self.first.dtype:
            return f"it computes in {info.dtype} now, and did in {self.first.dtype} before (--torch_dtype)"
        if self._adapters and not info.own_base:
            return "it holds whole weights that another run has pushed, and adapters need its own: start it anew"
        if info.max_lora_rank != self.first.max_lora_rank:
            now, before = info.max_lora_rank or 0, self.first.max_lora_rank or 0
            return f"it takes adapters up to rank {now} now, and did up to {before} before (--vllm_enable_lora)"
        needed = min(self._expected.max_tokens or self.first.max_model_len, self.first.max_model_len)
        if info.max_model_len < needed:
            return f"it takes only {info.max_model_len} tokens now (--max_model_len), this run needs {needed}"
        return self._expected.fault(info)

    def _was_replaced(self) -> bool:
        try:
            return self._client.info().instance != self._instance
        except (ServerUnreachable, ServerRefused) as error:
            logger.info("no word from the rollout server after it refused an update: %s", error)
            return True

    def _found(self) -> None:
        with self._lock:
            self._losses, self._is_lost = 0, False

    def _lost(self, error: SwiftError) -> NoReturn:
        with self._lock:
            # All that hang on one server lose it at once: that is one loss.
            self._losses += not self._is_lost
            self._is_lost = True
        refused = isinstance(error, ServerRefused) and error.status != NOT_NOW
        if self._losses >= (_MAX_REFUSALS if refused else _MAX_LOSSES):
            kind = GoneAgain if isinstance(error, ServerUnreachable) else RefusedAgain
            raise kind(f"{error} (lost {self._losses} times in a row, with nothing gained in between)") from error
        logger.warning("%s; waiting up to %g s for it", error, self._timeout_s)
        raise ServerLost from error


def _check_versions(output: RolloutOutput, versions: Container[int]) -> None:
    for completion in output.completions:
        oldest, newest = completion.weight_version, completion.newest_weight_version
        others = [one for one in (oldest, oldest if newest is None else newest) if one not in versions]
        if completion.finish_reason == "abort" or others:
            raise OtherWeights(
                f"the rollout server answered with weight version {(others or [oldest])[0]} "
                f"({completion.finish_reason}), which was not published: another trainer may be writing to it"
            )
