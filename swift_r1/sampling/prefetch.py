"""Generating ahead (`--async_generate true`): coming rounds are rolled out and scored while the trainer trains.

Threads of the main rank run the same `Collector` as a synchronous run, one round each. Round `n` may begin once weights
of `n - K` rounds are served, so that it is at most `K` rounds old (`--max_staleness`) when its turn comes. Rounds begin
in order, and a round begins when three quarters of the one before it are answered: the engine is not left with a
round's last long completions alone, and the round that the trainer waits for is not slowed down by the next. Where a
round takes further prompts on its way (`--dynamic_sample`) or is played by one stage (several turns), the next waits
for its end.

Only the trainer's thread pushes weights: that is collective. A server that was lost is brought back by its pool.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swift_r1.arguments import RlhfArguments
from swift_r1.errors import RunFailed
from swift_r1.runtime.ranks import Ranks
from swift_r1.runtime.watchdog import Watchdog
from swift_r1.sampling.collecting import Collector
from swift_r1.sampling.multi_turn import MultiTurn, OneTurn, Stage
from swift_r1.sampling.pool.health import GatherAgain
from swift_r1.sampling.pool.pool import ServerPool
from swift_r1.sampling.remote import AheadRollouts, ServerRollouts
from swift_r1.sampling.scoring import ScoredRound
from swift_r1.sampling.staleness import oldest_rounds, staleness_metrics
from swift_r1.tracking.recorder import SilentRecorder
from swift_r1.tracking.stopwatch import Stopwatch
from swift_r1.training.batch.batching import RoundBatch
from swift_r1.training.context import Parts

logger = logging.getLogger("swift_r1.training")

_TELL_S = 2.0  # between two words on how a round stands
_LOOK_S = 0.5  # between two looks at the servers
_CLOSE_S = 10.0
_ENOUGH = 0.75  # of a round answered, so that the next may begin


class _Ended(Exception):
    """The run is over: nobody wants the round."""


@dataclass(slots=True, eq=False)
class Round:
    """A round in the making, or made; `position` of the prompts after it, once the next may begin."""

    number: int
    asked: int = 0
    answered: int = 0
    position: tuple[int, str] | None = None
    rolled_out: tuple[RoundBatch, ScoredRound] | None = None
    fault: Exception | None = None
    ended: bool = False


@dataclass(eq=False)
class _Heard(SilentRecorder):
    """What the collector of a round tells, to `Rounds`."""

    rounds: Rounds
    round: Round

    def phase(self, name: str, total: int) -> None:
        self.rounds.changed(self.round, asked=total)

    def phase_advance(self, count: int) -> None:
        self.rounds.changed(self.round, answered=count)


class Rounds:
    """The rounds under way and those that wait for the trainer; on the main rank.

    Args:
        parts: of the run.
        pool: of the run's servers.
        stage: where trajectories of several turns are played, not that of the trainer's thread.
    """

    def __init__(self, parts: Parts, pool: ServerPool, stage: Stage | None) -> None:
        assert parts.main is not None
        self.parts, self.pool, self.stage = parts, pool, stage
        self.position = (parts.main.prompts.taken, parts.main.prompts.digest)
        self._in_order = stage is not None or parts.args.dynamic_sample
        self._changed = threading.Condition()
        self._rounds: dict[int, Round] = {}
        self._next: int | None = None
        self._end = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    # The trainer's thread

    def allow(self, begun: int, trained: int) -> None:
        """Weights of `trained` rounds are served: rounds may begin that they are fresh enough for, but for the `begun`
        ones that the trainer has had."""
        with self._changed:
            if self._next is None:
                self._next = begun
            self._end = min(trained + self.parts.args.max_staleness + 1, self.parts.plan.rounds)
            self._begin()

    def wait(self, number: int, heard: Callable[[Round], None]) -> None:
        """Until round `number` has ended; `heard` is told every few seconds how it stands.

        Raises:
            GatherAgain: the servers need the weights from all ranks.
            SwiftError: what ended the round.
        """
        told = time.monotonic()
        while True:
            with self._changed:
                round_ = self._rounds[number]
                if round_.ended:
                    break
                if self.pool.health.wants_gather:
                    raise GatherAgain
                self._changed.wait(_LOOK_S)
            if time.monotonic() > told + _TELL_S:
                heard(round_)
                told = time.monotonic()
        heard(round_)
        if round_.fault is not None:
            raise round_.fault

    def take(self, number: int) -> tuple[RoundBatch, ScoredRound]:
        """A round that has ended well."""
        with self._changed:
            round_ = self._rounds.pop(number)
        assert round_.rolled_out is not None and round_.position is not None
        self.position = round_.position
        return round_.rolled_out

    def close(self) -> None:
        """Calls off what is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if alive := [thread.name for thread in self._threads if thread.is_alive()]:
            logger.warning("%s did not end within %g s: left behind", ", ".join(alive), _CLOSE_S)

    # The rounds' threads

    def check_going_on(self) -> None:
        if self._closed:
            raise _Ended

    def await_restored(self) -> None:
        """Until the trainer's thread has pushed the weights again."""
        while not self.pool.health.ready:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _LOOK_S)
            self.check_going_on()

    def changed(self, round_: Round, asked: int = 0, answered: int = 0) -> None:
        """`asked` and `answered` completions more."""
        with self._changed:
            round_.asked += asked
            round_.answered += answered
            if not self._in_order and round_.answered >= _ENOUGH * round_.asked > 0:
                self._pass_on(round_)
            self._changed.notify_all()

    def _begin(self) -> None:
        """Begins the next round if it may. Under the lock."""
        number = self._next
        if number is None or number >= self._end or self._closed:
            return
        before = self._rounds.get(number - 1)
        if before is not None and (before.position is None or before.fault is not None):
            return
        self._rounds[number] = round_ = Round(number)
        self._next = number + 1
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._run, args=(round_,), name=f"round {number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pass_on(self, round_: Round) -> None:
        """The next round may take its prompts. Under the lock."""
        if round_.position is None:
            assert self.parts.main is not None
            prompts = self.parts.main.prompts
            round_.position = (prompts.taken, prompts.digest)
            self._begin()

    def _run(self, round_: Round) -> None:
        stopwatch = Stopwatch()
        try:
            with stopwatch.timed("ahead"):
                step = round_.number * self.parts.plan.optimizer_steps_per_round
                batch, scored = Collector(self._parts_of(round_), Stopwatch()).roll_out(round_.number, step)
            assert scored is not None
            scored.metrics["rollout/ahead_seconds"] = stopwatch.take()["ahead"]
            round_.rolled_out = batch, scored
        except Exception as error:  # noqa: BLE001  whatever it is, the trainer's thread raises it
            round_.fault = error
        finally:
            with self._changed:
                if round_.rolled_out is None and round_.fault is None:
                    round_.fault = RunFailed(f"the thread of round {round_.number} has ended")
                round_.ended = True
                if round_.fault is None:
                    self._pass_on(round_)
                self._changed.notify_all()

    def _parts_of(self, round_: Round) -> Parts:
        """What a round's collector works with: it is alone, and what it tells is for `Rounds`."""
        alone = Ranks(0, 1, self.parts.ranks.device, None)
        oldest = round_.number - self.parts.args.max_staleness
        rollouts = AheadRollouts(self.pool, oldest, self)
        return replace(
            self.parts,
            ranks=alone,
            turns=OneTurn(rollouts) if self.stage is None else MultiTurn(rollouts, alone, self.stage),
            recorder=_Heard(self, round_),
            # The run's own hears of what the trainer's thread waits for.
            watchdog=Watchdog(0, self.parts.ranks.rank),
        )


def open_collector(parts: Parts, stopwatch: Stopwatch) -> Collector | AheadCollector:
    """What rolls rounds out as the flags say."""
    if not generates_ahead(parts.args):
        return Collector(parts, stopwatch)
    rollouts = parts.rollouts
    assert isinstance(rollouts, ServerRollouts)
    rounds = None
    if rollouts.pool is not None:
        rounds = Rounds(parts, rollouts.pool, parts.main and parts.main.stage_ahead)
    return AheadCollector(parts, stopwatch, rollouts, rounds)


def generates_ahead(args: RlhfArguments) -> bool:
    return args.async_generate and args.max_staleness > 0


@dataclass
class AheadCollector:
    """The `Collector` of a run that generates ahead; `rounds` on the main rank alone. All methods are collective."""

    parts: Parts
    stopwatch: Stopwatch
    rollouts: ServerRollouts
    rounds: Rounds | None
    _heard: int = field(default=0, init=False)

    def publish(self, begun: int, in_the_middle: bool) -> None:
        """As of `Collector`, while the server goes on generating; rounds may begin that these are fresh enough for."""
        trained = begun - in_the_middle
        self.rollouts.served.rounds = trained
        self.rollouts.publish_weights()
        if self.rounds is not None:
            self.rounds.allow(begun, trained)

    def roll_out(self, number: int, step: int) -> tuple[RoundBatch, ScoredRound | None]:
        """As `Collector.roll_out`; waits for the round where it is not there yet.

        Raises:
            RunFailed: a completion is older than `--max_staleness` allows.
        """
        parts = self.parts
        self._heard = 0
        parts.watchdog.progress("generation")
        parts.recorder.phase("generating", parts.plan.completions_per_round)

        def wait(_pool: ServerPool) -> None:
            assert self.rounds is not None
            self.rounds.wait(number, self._hear)

        with self.stopwatch.timed("generate"):
            self.rollouts.attend(wait)
        parts.recorder.phase_end()
        if self.rounds is None:
            return RoundBatch(*parts.ranks.broadcast(None)), None
        batch, scored = self.rounds.take(number)
        self._check(number, scored)
        if parts.ranks.world_size > 1:
            parts.ranks.broadcast(batch.tensors())
        return batch, scored

    @property
    def position(self) -> tuple[int, str]:
        """As of `Collector`: what later rounds have taken does not count, a resumed run takes it again."""
        assert self.rounds is not None
        return self.rounds.position

    def close(self) -> None:
        if self.rounds is not None:
            self.rounds.close()

    def _hear(self, round_: Round) -> None:
        if round_.answered > self._heard:
            self.parts.completions_done(round_.answered - self._heard)
            self._heard = round_.answered

    def _check(self, number: int, scored: ScoredRound) -> None:
        completions = [item.completion for item in scored.trained + scored.dropped]
        rounds, allowed = oldest_rounds(completions, self.rollouts.served), self.parts.args.max_staleness
        if number - rounds > allowed:
            raise RunFailed(
                f"round {number} has completions by weights of {rounds} rounds, older than --max_staleness {allowed}"
            )
        scored.metrics |= staleness_metrics(completions, number, self.rollouts.served)
