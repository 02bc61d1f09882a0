"""Completions from a `swift rollout` server: the main rank talks to it, all ranks gather the weights.

A server that is lost on the way is waited for, brought to the trainer's weights, and asked again for exactly what it
had not answered. All ranks take part, since gathering weights is collective: after each attempt of the main rank a
broadcast tells the others how it ended.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch

from swift_r1.errors import EXIT_SERVER_UNREACHABLE, RunFailed, ServerUnreachable, SwiftError
from swift_r1.models.weights import adapter_weights, policy_weights
from swift_r1.runtime.ranks import Ranks
from swift_r1.sampling.base import OnDone, OnOutput, TrainedPolicy
from swift_r1.sampling.pool.pool import Fleet
from swift_r1.sampling.pool.session import ServerLink, ServerLost
from swift_r1.sampling.staleness import ServedVersions
from swift_r1.sampling.weight_check import mean_difference, own_logprobs, probe_sequences, tolerance
from swift_r1.weights.expected import as_in_checkpoint
from swift_r1.wire.protocol import AdapterConfig, RolloutOutput, RolloutRequest

logger = logging.getLogger("swift_r1.sampling.base")

# How an attempt of the main rank ended; an exit code stands for the error that ends the run.
_DONE, _LOST = 0, -1
_NO_PUSH = -1


def _nothing() -> None: ...


class ServerRollouts:
    """The `Rollouts` of a server.

    Args:
        link: on the main rank, None elsewhere.
        first_version: of the weights that the server holds now.
        check_steps: updates between two checks that the engine uses what it was sent; 0 for none.
        adapter: of the policy, where the server takes it alone; it has the base weights from its own `--model`.

    Attributes:
        served: what was pushed.
        before_scoring: called on all ranks before the server scores, which an engine that sleeps cannot do.
    """

    def __init__(
        self,
        link: ServerLink | Fleet | None,
        backend: TrainedPolicy,
        ranks: Ranks,
        first_version: int,
        check_steps: int = 0,
        adapter: AdapterConfig | None = None,
    ) -> None:
        self.link, self.backend, self.ranks = link, backend, ranks
        self.weight_version = first_version
        self.max_model_length = link.first.max_model_len if link is not None else None
        self._check_steps, self._updates = check_steps, 0
        self._adapter = adapter
        self.served = ServedVersions()
        self.before_scoring: Callable[[], None] = lambda: None
        self._metrics: dict[str, float] = {}

    def generate(
        self, requests: Sequence[RolloutRequest] | None, on_done: OnDone, on_output: OnOutput
    ) -> list[RolloutOutput] | None:
        """Every request is answered once, whatever happens to the server meanwhile.

        Raises:
            ServerUnreachable: the server did not come back.
            RunFailed: it refused, or another trainer writes to it.
        """
        asked = list(requests or ())
        answers: dict[str, RolloutOutput] = {}

        def answered(output: RolloutOutput) -> None:
            answers[output.request_id] = output
            on_done(len(output.completions))
            on_output(output)

        def ask(link: ServerLink | Fleet) -> None:
            missing = [request for request in asked if request.request_id not in answers]
            if len(missing) < len(asked):
                logger.info("asking again for the %d of %d prompts that were not answered", len(missing), len(asked))
            link.ask(missing, (self.weight_version,), answered, _nothing)

        self.attend(ask)
        return None if requests is None else [answers[request.request_id] for request in asked]

    def attend(self, work: Callable[[ServerLink], None]) -> None:
        """Runs `work` on the main rank until it ends without ServerLost; after each loss the server is brought back,
        with these weights. All other ranks take part in that. Whatever `work` waits for has a deadline.

        Raises:
            ServerUnreachable, RunFailed: as `work` and `generate` do.
        """
        while self._attempt(work) == _LOST:
            self._restore()

    def resume(self, weight_version: int) -> None:
        """Nothing to do: a server counts by itself, over all runs that it has served."""

    def publish_weights(self) -> None:
        """Also checks, after the first update and every `check_steps` updates, that the engine uses them.

        Raises as `generate` does.
        """
        self.weight_version += 1
        if self._push() == _LOST:
            self._restore()
        if self.link is not None:
            self.link.pushed()
        self._updates += 1
        # Nothing else tells whether the server's base weights are those that an adapter was trained on.
        first = self._updates == 1 and (self._check_steps or self._adapter is not None)
        if first or (self._check_steps and self._updates % self._check_steps == 0):
            self._check_weights()

    def sleep(self, level: int) -> None:
        """The engine gives its memory back; raises as `generate` does."""
        self.attend(lambda link: link.sleep(level))

    def wake(self) -> None:
        """The engine has its memory again, and these weights; raises as `generate` does."""
        self.attend(lambda link: link.wake())

    def take_metrics(self) -> dict[str, float]:
        taken, self._metrics = self._metrics, {}
        if self.link is not None:
            taken["rollout/refused"], self.link.refused = float(self.link.refused), 0
            taken["rollout/servers"] = float(self.link.take_servers())
            taken["rollout/bytes"] = float(self.link.take_bytes())
        return taken

    def _check_weights(self) -> None:
        """Compares the engine's log-probs with the trainer's; one full push is tried as a repair.

        Raises:
            RunFailed: they differ by more than rounding after it too.
        """
        difference, allowed = self._difference()
        self._metrics["rollout/weight_check"] = difference
        if difference <= allowed:
            return
        what = f"the engine's log-probs differ from the trainer's by {difference:.3g} nats on average"
        if self.link is not None:
            logger.warning(
                "%s after weight version %d (rounding explains %g): pushing all weights once more",
                *(what, self.weight_version, allowed),
            )
        self.weight_version += 1
        if self._push() == _LOST:
            self._restore()
        again, allowed = self._difference()
        if again > allowed:
            raise RunFailed(
                f"{what}, and by {again:.3g} after a full push (rounding explains {allowed:g}): "
                "the engine does not use the weights that it was sent"
                + (", or its base weights (its --model) are not those of --model" if self._adapter else "")
            )

    def _difference(self) -> tuple[float, float]:
        """The mean difference of log-probs, and what of it rounding explains; the same on every rank."""
        vocab_size = self.backend.model.config.get_text_config().vocab_size
        sequences = probe_sequences(vocab_size)
        own = own_logprobs(self.backend, sequences, self.ranks.device)
        self.before_scoring()
        found = None

        def compare(link: ServerLink | Fleet) -> None:
            nonlocal found
            own_dtype = str(self.backend.model.dtype).removeprefix("torch.")
            difference = link.farthest(sequences, self.weight_version, lambda rows: mean_difference(rows, own))
            found = [torch.tensor([difference, tolerance(own_dtype, link.first.dtype)], dtype=torch.float32)]

        self.attend(compare)
        difference, allowed = self.ranks.broadcast(found)[0].tolist()
        # What is not a number is no agreement.
        return (difference if math.isfinite(difference) else math.inf), allowed

    def _restore(self) -> None:
        """Waits for the server and brings it to the weights of this moment."""
        while True:
            target = _NO_PUSH

            def reconnect(link: ServerLink | Fleet) -> None:
                nonlocal target
                wanted = link.reconnect(self.weight_version, _nothing)
                target = _NO_PUSH if wanted is None else wanted

            if self._attempt(reconnect) == _LOST:
                continue
            target = int(self.ranks.broadcast([torch.tensor([target])] if self.link is not None else None)[0])
            if target == _NO_PUSH:
                return
            self.weight_version = target
            if self._push() == _DONE:
                # A server that came back is a new engine: the next update is checked as the first one was.
                self._updates = 0
                return

    def _push(self) -> int:
        self.served.pushing(self.weight_version)
        model = self.backend.model
        weights = policy_weights(model) if self._adapter is None else adapter_weights(model)
        # NCCL reads them where they are: through host memory they would be copied twice.
        on_host = not (isinstance(self.link, ServerLink) and self.link.by_nccl)
        buckets = self.backend.weight_buckets(weights, on_host=on_host)
        if self._adapter is None:
            buckets = (list(as_in_checkpoint(model, dict(bucket)).items()) for bucket in buckets)

        def send(link: ServerLink | Fleet) -> None:
            try:
                link.push(self.weight_version, buckets, self._adapter)
            finally:
                # Gathering is collective: the other ranks go through all buckets, whatever becomes of the push.
                for _bucket in buckets:
                    pass

        if self.link is None:
            for _bucket in buckets:
                pass
        return self._attempt(send)

    def _attempt(self, work: Callable[[ServerLink | Fleet], None]) -> int:
        """Runs `work` on the main rank; every rank gets `_DONE` or `_LOST`, or raises what ends the run."""
        if self.link is None:
            code = int(self.ranks.broadcast(None)[0])
            if code > 0:
                kind = ServerUnreachable if code == EXIT_SERVER_UNREACHABLE else RunFailed
                raise kind("the main rank gave up on the rollout server")
            return code
        code, fault = _DONE, None
        try:
            with self.ranks.busy():
                work(self.link)
        except ServerLost:
            code = _LOST
        except SwiftError as error:
            code, fault = error.exit_code, error
        self.ranks.broadcast([torch.tensor([code])])
        if fault is not None:
            raise fault
        return code
