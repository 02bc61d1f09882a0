"""Completions from `swift rollout` servers: rank 0 talks to them, all ranks gather the weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import torch

from swift_r1.data.images import ImageFile
from swift_r1.errors import EXIT_SERVER_UNREACHABLE, RunFailed, ServerUnreachable, SwiftError
from swift_r1.models.expected import adapter_in_checkpoint, as_in_checkpoint
from swift_r1.models.multimodal import probe_tokens
from swift_r1.models.policy import ModelInputs
from swift_r1.models.weights import adapter_weights, pushed_weights
from swift_r1.rollout.base import NO_IMAGES, OnDone, OnOutput, TrainedPolicy, still_wanted
from swift_r1.rollout.calls import OpenCalls, answers_of
from swift_r1.rollout.image_probe import ImageProbe, as_tensors, largest_difference
from swift_r1.rollout.pool.health import GatherAgain
from swift_r1.rollout.pool.pool import ServerPool
from swift_r1.rollout.staleness import ServedVersions
from swift_r1.runtime.ranks import Ranks
from swift_r1.sync.buckets import Tensors
from swift_r1.wire.protocol import AdapterConfig, Completion, RolloutOutput, RolloutRequest

logger = logging.getLogger(__name__)

# How an attempt of rank 0 ended, which a broadcast tells the others; an exit code stands for the error that ends the
# run.
_DONE = 0
_GATHER_AGAIN = -1

# of the weight check
_SEQUENCES = 4
_LENGTH = 48
TOLERANCE = 0.01
TOLERANCE_16_BIT = 0.2
TOLERANCE_FP8 = 1.0
"""Largest mean difference (nats) between two engines' log-probs that rounding explains. In bf16 SmolLM2 differs by
0.075 from itself in float32 on these tokens; an output head that stayed behind by a few updates made it 0.25."""


class _Unwanted(Exception):
    """Ends a pool's `ask`."""


class ServerRollouts:
    """The `Rollouts` of a pool of servers, which brings lost ones back by itself. Methods raise ServerUnreachable where
    no server came back, and RunFailed where one refused, or another trainer writes to it.

    Args:
        pool: on rank 0, None elsewhere.
        check_steps: updates between two checks that the engines use what they were sent; 0 for none.
        adapter: of the policy, where the servers take it alone; they have the base weights from their own `--model`.
        probe: of a policy with a tower that is sent to them.

    Attributes:
        weight_version: the highest number of the weights that the servers hold.
        can_sleep: whether the engines do.
        before_scoring: called on all ranks before servers score, which an engine that sleeps cannot do.
    """

    def __init__(
        self,
        pool: ServerPool | None,
        backend: TrainedPolicy,
        ranks: Ranks,
        check_steps: int = 0,
        adapter: AdapterConfig | None = None,
        can_sleep: bool = False,
        probe: ImageProbe | None = None,
    ) -> None:
        self.pool = pool
        self.backend = backend
        self.ranks = ranks
        self.served = ServedVersions() if pool is None else pool.served
        self.weight_version = 0 if pool is None else pool.version
        self.max_model_length = None if pool is None else pool.first.max_model_len
        self._check_steps = check_steps
        self._updates = 0
        self._as_loaded = True
        self._rounding = 0.0
        self._adapter = adapter
        self._probe = probe
        self.can_sleep = can_sleep
        self.before_scoring: Callable[[], None] = lambda: None
        self.unwanted = still_wanted
        self._metrics: dict[str, float] = {}

    def generate(
        self,
        requests: Sequence[RolloutRequest] | None,
        on_done: OnDone,
        on_output: OnOutput,
        images: Mapping[str, ImageFile] = NO_IMAGES,
    ) -> list[RolloutOutput] | None:
        """Answers every request once, whatever happens to the servers meanwhile; those that are `unwanted` with
        nothing."""
        if requests is None:
            self.answer(None)
            return None
        answers = answers_of(requests, self.answer, on_done, on_output, images)
        nothing = Completion(
            token_ids=(), logprobs=(), finish_reason="length", weight_version=self.weight_version
        )
        for request in requests:
            if request.request_id not in answers:
                output = RolloutOutput(
                    request_id=request.request_id, completions=(nothing,) * request.n
                )
                answers[request.request_id] = output
                on_done(request.n)
                on_output(output)
        return [answers[request.request_id] for request in requests]

    def answer(self, calls: OpenCalls | None) -> None:
        """Answers every call once, as it comes, until they are closed, or completions are `unwanted`. Collective; the
        other ranks pass None."""

        def look() -> None:
            if self.unwanted():
                raise _Unwanted
            assert calls is not None
            calls.look()

        def ask(pool: ServerPool) -> None:
            assert calls is not None
            with suppress(_Unwanted):
                pool.ask(calls, pool.served.current, look=look)

        self.attend(ask)

    def attend(self, work: Callable[[ServerPool], None]) -> None:
        """Runs `work` on rank 0, again after each time that all ranks had to gather the weights for it. Whatever `work`
        waits for has a deadline."""
        while not self._attempt(work):
            self._gather()

    def resume(self, weight_version: int) -> None:
        """The policy is not what the servers have loaded. They count their versions, over all runs."""
        self._as_loaded = False

    def publish_weights(self) -> None:
        """Also checks, after the first update and every `check_steps` updates, that the engines use them."""
        checks_first = bool(self._check_steps) or self._adapter is not None
        if checks_first and not self._updates and self._as_loaded:
            self._measure_rounding()
        self._gather()
        if self.pool is not None:
            self.pool.published()
        # A server that came back is a new engine: this update of it is checked as the first one was.
        returned = self._on_all_ranks(lambda pool: (pool.health.take_returned(),))
        self._updates = 1 if any(returned) else self._updates + 1
        # Nothing else tells whether the server's base weights are those that an adapter was trained on.
        if (self._updates == 1 and checks_first) or (
            self._check_steps and self._updates % self._check_steps == 0
        ):
            self._check_weights()

    def sleep(self, level: int) -> None:
        """The engines give their memory back."""
        self.attend(lambda pool: pool.sleep(level))

    def wake(self) -> None:
        """The engines have their memory again, and these weights."""
        self.attend(lambda pool: pool.wake())

    def take_metrics(self) -> dict[str, float]:
        taken = self._metrics
        self._metrics = {}
        return taken if self.pool is None else taken | self.pool.take_metrics()

    def _gather(self) -> None:
        """Gathers the weights and sends them to the servers, again where one has lost them meanwhile."""
        while not self._gather_once():
            pass

    def _gather_once(self) -> bool:
        model = self.backend.model
        weights = pushed_weights(model) if self._adapter is None else adapter_weights(model)
        on_host = self.pool is None or not self.pool.from_device(self._adapter is not None)
        gathered = self.backend.weight_buckets(weights, on_host=on_host)

        def buckets() -> Iterator[Tensors]:
            named = as_in_checkpoint if self._adapter is None else adapter_in_checkpoint
            for bucket in gathered:
                yield list(named(model, dict(bucket)).items())

        def send(pool: ServerPool) -> None:
            try:
                pool.publish(buckets(), self._adapter)
            finally:
                # Gathering is collective: the other ranks go through all buckets, whatever becomes of the push.
                for _bucket in gathered:
                    pass

        if self.pool is None:
            for _bucket in gathered:
                pass
        return self._attempt(send)

    def _attempt(self, work: Callable[[ServerPool], None]) -> bool:
        """Runs `work` on rank 0; every rank learns whether it is done, or raises what ends the run."""
        code = _DONE
        fault = None
        if self.pool is not None:
            try:
                with self.ranks.busy():
                    work(self.pool)
            except GatherAgain:
                code = _GATHER_AGAIN
            except SwiftError as error:
                code = error.exit_code
                fault = error
            why = torch.tensor(list(str(fault or "").encode()), dtype=torch.uint8)
            self.ranks.broadcast([torch.tensor([code, self.pool.version]), why])
            self.weight_version = self.pool.version
        else:
            told, why = self.ranks.broadcast(None)
            code, self.weight_version = told.tolist()
        if fault is not None:
            raise fault
        if code > 0:  # whichever rank ends first is the one that is heard
            kind = ServerUnreachable if code == EXIT_SERVER_UNREACHABLE else RunFailed
            raise kind(why.numpy().tobytes().decode())
        return code == _DONE

    def _measure_rounding(self) -> None:
        """Allows twice the difference that is there in 16 bits before the first update, while the servers still have
        what they have loaded: that of some models is above the usual one."""

        def rounds(pool: ServerPool) -> tuple[float]:
            # an engine may sleep without weights
            as_loaded = pool.version == 0 and pool.first.broken is None
            return (as_loaded and self._explained(pool) == TOLERANCE_16_BIT,)

        if any(self._on_all_ranks(rounds)):
            difference, allowed = self._difference()
            # Further apart they have not loaded the same.
            if allowed < 2 * difference <= TOLERANCE_FP8:
                self._rounding = 2 * difference
                if self.pool is not None:
                    logger.info(
                        "weight check: rounding is %.3g nats, twice that is allowed", difference
                    )

    def _on_all_ranks(self, of: Callable[[ServerPool], Sequence[float]]) -> list[float]:
        """Returns on every rank what `of` returns for rank 0's pool, in float32."""
        values = None if self.pool is None else [torch.tensor(of(self.pool), dtype=torch.float32)]
        found: list[float] = self.ranks.broadcast(values)[0].tolist()
        return found

    def _explained(self, pool: ServerPool) -> float:
        return explained_difference(
            str(self.backend.model.dtype).removeprefix("torch."), pool.first.dtype
        )

    def _check_weights(self) -> None:
        """Compares the engines' log-probs with the trainer's; one full push is tried as a repair, then RunFailed
        raised."""
        difference, allowed = self._difference()
        self._metrics["rollout/weight_check"] = difference
        if difference <= allowed:
            return
        what = (
            f"the engine's log-probs differ from the trainer's by {difference:.3g} nats on average"
        )
        if self.pool is not None:
            logger.warning(
                "%s after weight version %d (rounding explains %g): pushing all weights once more",
                *(what, self.weight_version, allowed),
            )
        self._gather()
        again, allowed = self._difference()
        if again > allowed:
            base = (
                ", or its base weights (its --model) are not those of --model"
                if self._adapter
                else ""
            )
            raise RunFailed(
                f"{what}, and by {again:.3g} after a full push (rounding explains {allowed:g}): "
                f"the engine does not use the weights that it was sent{base}"
            )

    def _difference(self) -> tuple[float, float]:
        """The mean difference of log-probs, and how much of it rounding explains; the same on every rank.

        Hashes prove that bytes arrived, not that the engine uses them: repacked copies, tied heads and quantised layers
        can stay at an old version without an error.
        """
        model = self.backend.model
        sequences = probe_sequences(model.config)
        own = own_logprobs(self.backend, sequences, self.ranks.device)
        self.before_scoring()
        differences: list[float] = []

        def compare(pool: ServerPool) -> None:
            differences.append(
                pool.largest_difference(sequences, lambda rows: mean_difference(rows, own))
            )

        self.attend(compare)
        text, allowed = self._on_all_ranks(
            lambda pool: (differences[-1], max(self._explained(pool), self._rounding))
        )
        both = (text, 0.0 if self._probe is None else self._image_difference(self._probe))
        return (max(both) if all(map(math.isfinite, both)) else math.inf), allowed

    def _image_difference(self, probe: ImageProbe) -> float:
        """The same of what the engines write behind an image."""
        answers: list[RolloutOutput] = []

        def ask(pool: ServerPool) -> None:
            request = probe.request(f"weight-check/{uuid4()}")
            length = len(request.prompt_token_ids) + request.sampling.max_tokens
            if length > pool.first.max_model_len:
                logger.info("weight check: of text alone, an image would take %d tokens", length)
                return
            answers[:] = pool.answers(request, probe.read_image)

        self.attend(ask)
        done = [output.completions[0] for output in answers]
        told = as_tensors([one.token_ids for one in done], [one.logprobs for one in done])
        count, written, logps = self.ranks.broadcast(None if self.pool is None else told)
        if not int(count):
            return 0.0
        own = probe.logprobs(self.backend, written.view(int(count), -1), self.ranks.device)
        return largest_difference(own, logps.view_as(own))


@torch.no_grad()
def own_logprobs(
    backend: TrainedPolicy,
    sequences: Sequence[Sequence[int]],
    device: torch.device,
    temperature: float = 1.0,
) -> list[list[float]]:
    """The policy's log-probs of each sequence's tokens after the first; sequences of one length. Collective."""
    token_ids = torch.tensor(sequences, device=device)
    rows, length = token_ids.shape
    positions = torch.arange(rows * length, device=device).view(rows, length)[:, :-1].flatten()
    inputs = ModelInputs(token_ids, positions, token_ids[:, 1:].flatten())
    logps: list[list[float]] = (
        backend.logprobs(inputs, temperature).logps.float().view(rows, length - 1).tolist()
    )
    return logps


def probe_sequences(config: Any) -> list[tuple[int, ...]]:
    """The fixed prompts: any tokens do, since both sides read the same ones."""
    tokens = probe_tokens(_SEQUENCES * _LENGTH, config)
    return [tuple(tokens[start : start + _LENGTH]) for start in range(0, len(tokens), _LENGTH)]


def mean_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference of two lists of log-probs of the same tokens, in nats."""
    differences = [
        abs(a - b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    return sum(differences) / len(differences)


def explained_difference(*dtypes: str) -> float:
    """Returns the difference that rounding explains, for the dtypes of trainer and engine (`float32`, `bfloat16`,
    `float16`, `fp8_...`). Of fp8 that is a guess, not measured yet: large enough that only another model is found
    out."""
    if any(dtype.startswith("fp8") for dtype in dtypes):
        return TOLERANCE_FP8
    return TOLERANCE if set(dtypes) == {"float32"} else TOLERANCE_16_BIT
