"""Prefetching (`--async_generate true`): coming rounds are sampled and scored while the trainer trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from swift_r1.data.images import ImageFile
from swift_r1.errors import RunFailed
from swift_r1.flags import RunFlags
from swift_r1.record.recorder import Recorder
from swift_r1.record.spans import Spans, Stopwatch
from swift_r1.rollout.base import NO_IMAGES, Generator, OnDone, OnOutput
from swift_r1.rollout.calls import OpenCalls, answers_of
from swift_r1.rollout.multi_turn import Turns
from swift_r1.rollout.pool.health import GatherAgain
from swift_r1.rollout.pool.pool import ServerPool
from swift_r1.rollout.prompts import Positions
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.rollout.rounds import RoundSampler
from swift_r1.rollout.scoring import ScoredRound
from swift_r1.rollout.staleness import oldest_rounds, staleness_metrics
from swift_r1.runtime.ranks import Ranks
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest

logger = logging.getLogger("swift_r1.training")

MakeTurns = Callable[[Generator, Ranks], Turns]

_LOOK_S = 0.5  # between two looks at the servers
_CLOSE_S = 10.0
_MAX_STALE_ANSWERS = 3  # to one request
# of a round answered, so that the next may begin: groups with a long completion are answered late
_ENOUGH = 0.25


def prefetches(args: RunFlags) -> bool:
    return args.async_generate and args.max_staleness > 0


class _Ended(Exception):
    """The run is over: the round is no longer needed."""


@dataclass(slots=True, eq=False)
class _Round:
    number: int
    asked: int = 0
    answered: int = 0
    told: int = 0  # of these, to the trainer
    # of the prompts after it, once the next round may begin
    positions: Positions | None = None
    scored: ScoredRound | None = None
    fault: Exception | None = None
    ended: bool = False


@dataclass(eq=False)
class _AskedRecorder(Recorder):
    """Hears how many completions a round asks for."""

    on_asked: Callable[[int], None]

    def phase(self, name: str, total: int) -> None:
        self.on_asked(total)


class Prefetcher:
    """The rounds under way and those that wait for the trainer; on rank 0.

    Each runs in a thread. Round `n` may begin once weights of `n - K` rounds are served, so that it is at most `K`
    rounds old (`--max_staleness`) when its turn comes, and a quarter of the round before it is answered: so the
    engine is not left with a round's last long completions alone. Only the trainer's thread pushes weights, since that
    is collective."""

    def __init__(
        self,
        sampler: RoundSampler,
        pool: ServerPool,
        make_turns: MakeTurns,
        spans: Spans | None = None,
    ) -> None:
        self.sampler = sampler
        self.pool = pool
        self._make_turns = make_turns
        self._spans = spans or Spans()
        self.positions = sampler.positions
        self._staleness = sampler.args.max_staleness
        # These rounds take further prompts on their way, or are led by a scheduler: each waits for the end of the last.
        self._in_order = sampler.args.leads_turns or sampler.args.dynamic_sample
        self._changed = threading.Condition()
        self._rounds: dict[int, _Round] = {}
        self._next: int | None = None
        self._end = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    # The trainer's thread

    def allow(self, begun: int, trained: int) -> None:
        """Weights of `trained` rounds are served: rounds that they are fresh enough for may begin, after the `begun`
        ones that the trainer has taken."""
        with self._changed:
            if self._next is None:
                self._next = begun
            self._end = min(trained + self._staleness + 1, self.sampler.plan.rounds)
            self._begin()

    def wait(self, number: int, on_done: OnDone) -> None:
        """Until round `number` has ended; `on_done` is told how many more completions are there.
        Raises what ended the round, and GatherAgain where the servers need the weights from all ranks."""
        round_ = self._rounds[number]
        ended = False
        while not ended:
            with self._changed:
                if not round_.ended and self.pool.health.wants_gather:
                    raise GatherAgain
                ended = self._changed.wait_for(lambda: round_.ended, _LOOK_S)
            more = round_.answered - round_.told
            round_.told = round_.answered
            if more:
                on_done(more)
        if round_.fault is not None:
            raise round_.fault

    def take(self, number: int) -> ScoredRound:
        """A round that has ended without a fault."""
        with self._changed:
            round_ = self._rounds.pop(number)
        assert round_.scored is not None and round_.positions is not None
        self.positions = round_.positions
        return round_.scored

    def close(self) -> None:
        """Calls off what is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if alive:
            logger.warning("%s did not end within %g s: left behind", ", ".join(alive), _CLOSE_S)

    # The rounds' threads

    def check_going_on(self) -> None:
        """Raises once the run is over."""
        if self._closed:
            raise _Ended

    def await_restored(self) -> None:
        """Until the trainer's thread has pushed the weights again."""
        while not self.pool.health.ready:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _LOOK_S)
            self.check_going_on()

    def _count(self, round_: _Round, asked: int = 0, answered: int = 0) -> None:
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
        if before is not None and (before.positions is None or before.fault is not None):
            return
        self._rounds[number] = round_ = _Round(number)
        self._next = number + 1
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(
            target=self._run, args=(round_,), name=f"round {number}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _pass_on(self, round_: _Round) -> None:
        """The next round may take its prompts. Under the lock."""
        if round_.positions is None:
            round_.positions = self.sampler.positions
            self._begin()

    def _run(self, round_: _Round) -> None:
        began = time.perf_counter()
        try:
            step = round_.number * self.sampler.plan.optimizer_steps_per_round
            scored = self._sampler_of(round_).sample(round_.number, step)
            assert scored is not None
            scored.metrics["rollout/ahead_seconds"] = time.perf_counter() - began
            round_.scored = scored
        except Exception as error:  # noqa: BLE001  whatever it is, the trainer's thread raises it
            round_.fault = error
        finally:
            with self._changed:
                if round_.scored is None and round_.fault is None:
                    round_.fault = RunFailed(f"the thread of round {round_.number} has ended")
                round_.ended = True
                if round_.fault is None:
                    self._pass_on(round_)
                self._changed.notify_all()

    def _sampler_of(self, round_: _Round) -> RoundSampler:
        """The run's, without the other ranks. Watchdog and recorder hear of what the trainer's thread waits for
        alone."""
        alone = Ranks(0, 1, self.sampler.ranks.device, None)
        # At most K + 1 rounds are under way at a time.
        lane = f"rollout-ahead-{round_.number % (self._staleness + 1)}"
        step = round_.number * self.sampler.plan.optimizer_steps_per_round + 1
        rollouts = PrefetchRollouts(self.pool, round_.number - self._staleness, self)
        return replace(
            self.sampler,
            ranks=alone,
            turns=self._make_turns(rollouts, alone),
            recorder=_AskedRecorder(lambda count: self._count(round_, asked=count)),
            stopwatch=Stopwatch(self._spans.lane(lane, step)),
            progress=lambda _doing: None,
            on_done=lambda count: self._count(round_, answered=count),
        )


@dataclass(frozen=True)
class PrefetchRollouts:
    """The `Generator` of one prefetched round, on rank 0."""

    pool: ServerPool
    oldest: int  # rounds that must be behind the weights of every completion
    prefetcher: Prefetcher

    def generate(
        self,
        requests: Sequence[RolloutRequest] | None,
        on_done: OnDone,
        on_output: OnOutput,
        images: Mapping[str, ImageFile] = NO_IMAGES,
    ) -> list[RolloutOutput] | None:
        """Answers every request once; raises as `answer`."""
        assert requests is not None
        answers = answers_of(requests, self.answer, on_done, on_output, images)
        return [answers[request.request_id] for request in requests]

    def answer(self, calls: OpenCalls | None) -> None:
        """Every call is answered once, as it comes, by weights that are not too old, until they are closed. Raises as
        `ServerPool.ask`, and RunFailed where a server keeps answering with weights that are."""
        assert calls is not None

        def answered(output: RolloutOutput) -> None:
            rounds = oldest_rounds(
                (one.weight_version for one in output.completions), self.pool.served
            )
            if rounds < self.oldest:
                self.pool.count_stale()
                times = calls.again(output.request_id)
                if times > _MAX_STALE_ANSWERS:
                    raise RunFailed(
                        f"the rollout server answered {times} times with weights of {rounds} rounds where "
                        f"--max_staleness wants at least {self.oldest}: it does not use what it was sent"
                    )
            else:
                calls.answered(output)

        def look() -> None:
            self.prefetcher.check_going_on()
            calls.look()

        while not calls.closed:
            try:
                self.pool.ask(calls, self.pool.served, answered, look)
            except GatherAgain:
                self.prefetcher.await_restored()


class PrefetchedRounds:
    """`RoundSampler` of a run that prefetches; `prefetcher` on rank 0 alone. All methods are collective."""

    def __init__(
        self,
        sampler: RoundSampler,
        rollouts: ServerRollouts,
        make_turns: MakeTurns,
        spans: Spans | None = None,
    ) -> None:
        self.sampler = sampler
        self.rollouts = rollouts
        self.prefetcher = None
        if rollouts.pool is not None:
            self.prefetcher = Prefetcher(sampler, rollouts.pool, make_turns, spans)

    def publish_weights(self, begun: int, in_the_middle: bool) -> None:
        """Publishes the weights while the server goes on generating; then further rounds may begin."""
        trained = begun - in_the_middle
        self.rollouts.served.rounds = trained
        self.rollouts.publish_weights()
        if self.prefetcher is not None:
            self.prefetcher.allow(begun, trained)

    def sample(self, number: int, step: int) -> ScoredRound | None:
        """Waits for a round and returns it; raises RunFailed for a completion that is older than `--max_staleness`
        allows."""
        sampler = self.sampler
        prefetcher = self.prefetcher
        sampler.progress("generation")
        sampler.recorder.phase("generating", sampler.plan.completions_per_round)

        def wait(_pool: ServerPool) -> None:
            assert prefetcher is not None
            prefetcher.wait(number, sampler.on_done)

        with sampler.stopwatch.timed("generate", "wait"):
            self.rollouts.attend(wait)
        sampler.recorder.phase_end()
        if prefetcher is None:
            return None
        scored = prefetcher.take(number)
        sequences = [
            sequence for trajectory in scored.generated for sequence in trajectory.sequences
        ]
        rounds = oldest_rounds(
            (sequence.oldest_version for sequence in sequences), self.rollouts.served
        )
        allowed = sampler.args.max_staleness
        if number - rounds > allowed:
            raise RunFailed(
                f"round {number} has completions by weights of {rounds} rounds, older than --max_staleness {allowed}"
            )
        scored.metrics.update(staleness_metrics(sequences, number, self.rollouts.served))
        return scored

    @property
    def positions(self) -> Positions:
        """The places in the prompts; what later rounds have taken does not count, since a resumed run takes it again."""
        assert self.prefetcher is not None
        return self.prefetcher.positions

    def close(self) -> None:
        if self.prefetcher is not None:
            self.prefetcher.close()
