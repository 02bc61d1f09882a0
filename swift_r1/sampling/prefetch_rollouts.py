"""Completions for a round that is not yet the trainer's turn, asked for in a thread of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swift_r1.errors import RunFailed
from swift_r1.sampling.base import OnDone, OnOutput
from swift_r1.sampling.pool.pool import Fleet
from swift_r1.sampling.pool.session import ServerLink, ServerLost
from swift_r1.sampling.staleness import ServedVersions, oldest_rounds
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest

_MAX_STALE_ANSWERS = 3  # to one request


class Trainer(Protocol):
    """What of the trainer's thread is needed here."""

    def check_going_on(self) -> None:
        """Raises where nobody wants the completions any more."""
        ...

    def await_restored(self, link: ServerLink) -> None:
        """Returns once a server that was lost is back with this run's weights."""
        ...


@dataclass(frozen=True)
class AheadRollouts:
    """The `Generator` of one round, on the main rank. A lost server is left to the trainer's thread to restore.

    Attributes:
        oldest: rounds that must be behind the weights of every completion.
    """

    link: ServerLink | Fleet
    served: ServedVersions
    oldest: int
    trainer: Trainer

    def generate(
        self, requests: Sequence[RolloutRequest] | None, on_done: OnDone, on_output: OnOutput
    ) -> list[RolloutOutput] | None:
        """Every request is answered once, by weights that are not too old.

        Raises:
            ServerUnreachable, RunFailed: as `ServerLink.ask`; a server that goes on answering with weights too old.
        """
        assert requests is not None
        answers: dict[str, RolloutOutput] = {}
        stale: Counter[str] = Counter()
        asked: dict[str, str] = {}

        def answered(output: RolloutOutput) -> None:
            name = asked[output.request_id]
            if (rounds := oldest_rounds(output.completions, self.served)) < self.oldest:
                self.link.refused += 1
                stale[name] += 1
                if stale[name] > _MAX_STALE_ANSWERS:
                    raise RunFailed(
                        f"the rollout server answered {stale[name]} times with weights of {rounds} rounds where "
                        f"--max_staleness wants at least {self.oldest}: it does not use what it was sent"
                    )
                return
            answers[name] = output.model_copy(update={"request_id": name})
            on_done(len(output.completions))
            on_output(answers[name])

        while missing := [request for request in requests if request.request_id not in answers]:
            # Asked again under the same name, a server would give the stale answer again, from memory.
            renamed = [
                request.model_copy(update={"request_id": f"{request.request_id}~{times}"}) if times else request
                for request in missing
                for times in (stale[request.request_id],)
            ]
            asked = {new.request_id: old.request_id for new, old in zip(renamed, missing, strict=True)}
            try:
                self.link.ask(renamed, self.served, answered, self.trainer.check_going_on)
            except ServerLost:
                assert isinstance(self.link, ServerLink)  # a fleet finds its servers again by itself
                self.trainer.await_restored(self.link)
        return [answers[request.request_id] for request in requests]
