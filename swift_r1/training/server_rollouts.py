"""Completions from a `swift rollout` server: the main rank talks to it, all ranks gather the weights.

A server that is lost on the way is waited for, brought to the trainer's weights, and asked again for exactly what it
had not answered. All ranks take part, since gathering weights is collective: after each attempt of the main rank a
broadcast tells the others how it ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from swift_r1.errors import EXIT_SERVER_UNREACHABLE, RunFailed, ServerUnreachable, SwiftError
from swift_r1.rollout.link import ServerLink, ServerLost
from swift_r1.rollout.protocol import RolloutOutput, RolloutRequest
from swift_r1.training.backends.base import Backend
from swift_r1.training.distributed import Ranks
from swift_r1.training.lora import policy_weights
from swift_r1.training.rollouts import OnDone, OnOutput

logger = logging.getLogger("swift_r1.training.rollouts")

# How an attempt of the main rank ended; an exit code stands for the error that ends the run.
_WAITING, _DONE, _LOST = -1, 0, -2
_NO_PUSH = -1


class ServerRollouts:
    """The `Rollouts` of a server.

    Args:
        link: on the main rank, None elsewhere.
        first_version: of the weights that the server holds now.
    """

    def __init__(self, link: ServerLink | None, backend: Backend, ranks: Ranks, first_version: int) -> None:
        self.link, self.backend, self.ranks = link, backend, ranks
        self.weight_version = first_version
        self.max_model_length = link.first.max_model_len if link is not None else None

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

        def ask(link: ServerLink) -> None:
            missing = [request for request in asked if request.request_id not in answers]
            if len(missing) < len(asked):
                logger.info("asking again for the %d of %d prompts that were not answered", len(missing), len(asked))
            link.ask(missing, self.weight_version, answered, self._still_waiting)

        while self._attempt(ask) == _LOST:
            self._restore()
        return None if requests is None else [answers[request.request_id] for request in asked]

    def publish_weights(self) -> None:
        """Raises as `generate` does."""
        self.weight_version += 1
        if self._push() == _LOST:
            self._restore()
        if self.link is not None:
            self.link.pushed()

    def _restore(self) -> None:
        """Waits for the server and brings it to the weights of this moment."""
        while True:
            target = _NO_PUSH

            def reconnect(link: ServerLink) -> None:
                nonlocal target
                wanted = link.reconnect(self.weight_version, self._still_waiting)
                target = _NO_PUSH if wanted is None else wanted

            self._attempt(reconnect)
            target = int(self.ranks.broadcast([torch.tensor([target])] if self.link is not None else None)[0])
            if target == _NO_PUSH:
                return
            self.weight_version = target
            if self._push() == _DONE:
                return

    def _push(self) -> int:
        buckets = self.backend.weight_buckets(policy_weights(self.backend.model))

        def send(link: ServerLink) -> None:
            try:
                link.push(self.weight_version, buckets)
            finally:
                # Gathering is collective: the other ranks go through all buckets, whatever becomes of the push.
                for _bucket in buckets:
                    pass

        if self.link is None:
            for _bucket in buckets:
                pass
        return self._attempt(send)

    def _attempt(self, work: Callable[[ServerLink], None]) -> int:
        """Runs `work` on the main rank; every rank gets `_DONE` or `_LOST`, or raises what ends the run."""
        if self.link is None:
            while (code := int(self.ranks.broadcast(None)[0])) == _WAITING:
                pass
            if code > 0:
                kind = ServerUnreachable if code == EXIT_SERVER_UNREACHABLE else RunFailed
                raise kind("the main rank gave up on the rollout server")
            return code
        code, fault = _DONE, None
        try:
            work(self.link)
        except ServerLost:
            code = _LOST
        except SwiftError as error:
            code, fault = error.exit_code, error
        self._tell(code)
        if fault is not None:
            raise fault
        return code

    def _still_waiting(self) -> None:
        """Keeps the other ranks' collective from timing out (`--ddp_timeout`) while the main rank waits."""
        self._tell(_WAITING)

    def _tell(self, code: int) -> None:
        self.ranks.broadcast([torch.tensor([code])])
