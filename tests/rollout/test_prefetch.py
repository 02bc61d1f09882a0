"""Rounds that are generated ahead: which may begin, by which weights, and what a lost or stale server does to them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_r1.errors import RunFailed
from swift_r1.rollout import prefetch
from swift_r1.rollout.base import ignore_output
from swift_r1.rollout.pool.health import GatherAgain
from swift_r1.rollout.pool.pool import ServerPool
from swift_r1.rollout.pool.session import Expected
from swift_r1.rollout.prefetch import PrefetchRollouts
from swift_r1.rollout.prompts import Position, Positions
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.base import EngineInfo, EnginePrompt, Generated
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutRequest, SamplingParams
from tests.live_servers import pool_of

WAIT_S = 30
EXPECTED = {"w": (2,)}
WEIGHTS = [[("w", torch.ones(2))]]


class HeldEngine:
    """Ends a completion of two tokens when it is let go, or when its weights change; `says` is the version that it
    claims, its own by default."""

    dead = scores_alone = False

    def __init__(self) -> None:
        self.info = EngineInfo("held", "0", 10, "", 100, "float32")
        self.version = 0
        self.says: list[int] = []
        self.started, self.may_end = threading.Event(), threading.Event()

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        began = self.version
        self.started.set()
        while not self.may_end.is_set() and self.version == began:
            await asyncio.sleep(0.01)
        versions = ((0, began), (1, self.version))[: 1 + (self.version != began)]
        return Generated(
            (1, 2), (-0.5, -0.5), "length", ((0, self.says.pop()),) if self.says else versions
        )

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        self.version = version

    def shutdown(self) -> None: ...


class Alone:
    """A trainer that does nothing."""

    def check_going_on(self) -> None: ...

    def await_restored(self) -> None:
        raise AssertionError("the server was lost")


@pytest.fixture
def engine() -> Iterator[HeldEngine]:
    made = HeldEngine()
    yield made
    made.may_end.set()


@pytest.fixture
def pool(serve_engine: Callable[..., str], engine: HeldEngine) -> Iterator[ServerPool]:
    """To a server that would wait for running rollouts; the trainer asks it not to."""
    with RolloutClient(serve_engine(engine, EXPECTED, update_timeout=5)) as client:
        pool = pool_of([client], Expected("m", "", 10, None), WAIT_S, policy="keep")
        yield pool
        pool.close()


def requests(count: int, name: str = "r") -> list[RolloutRequest]:
    sampling = SamplingParams(max_tokens=2)
    return [
        RolloutRequest(request_id=f"{name}/{i}", prompt_token_ids=(1,), sampling=sampling)
        for i in range(count)
    ]


def push(pool: ServerPool, version: int, rounds: int) -> None:
    pool.served.rounds = rounds
    pool.publish(WEIGHTS)
    pool.published()
    assert pool.version == version


def test_weights_change_under_a_running_completion(pool: ServerPool, engine: HeldEngine) -> None:
    got: list[Any] = []
    push(pool, 1, 0)

    def generate() -> None:
        got.extend(
            PrefetchRollouts(pool, 0, Alone()).generate(
                requests(1), lambda _count: None, ignore_output
            )
            or []
        )

    asking = threading.Thread(target=generate)
    asking.start()
    assert engine.started.wait(WAIT_S)
    push(pool, 2, 1)  # the engine goes on only after it
    asking.join(WAIT_S)
    [completion] = got[0].completions
    assert completion.weight_versions == ((0, 1), (1, 2))


def test_an_answer_by_weights_that_are_too_old_is_refused_and_asked_for_again(
    pool: ServerPool, engine: HeldEngine
) -> None:
    heard: list[Any] = []
    for version in (1, 2):
        push(pool, version, version - 1)
    engine.may_end.set()
    rollouts = PrefetchRollouts(pool, 1, Alone())
    engine.says = [1]
    outputs = rollouts.generate(requests(3), lambda _count: None, heard.append)
    assert outputs is not None and [one.request_id for one in outputs] == ["r/0", "r/1", "r/2"]
    assert {one.completions[0].weight_version for one in outputs} == {2}
    assert sorted(one.request_id for one in heard) == ["r/0", "r/1", "r/2"]
    assert pool.take_metrics()["rollout/refused"] == 1
    engine.says = [1] * 9
    with pytest.raises(
        RunFailed, match="4 times with weights of 0 rounds where --max_staleness wants at least 1"
    ):
        rollouts.generate(requests(1, "s"), lambda _count: None, ignore_output)


@dataclass
class Script:
    """What rounds do: each takes two prompts, is answered as far as it is told to, and ends."""

    began: list[int] = field(default_factory=list)
    answered: dict[int, threading.Event] = field(default_factory=dict)
    ends: dict[int, threading.Event] = field(default_factory=dict)
    lose: list[int] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        for number in range(20):
            self.answered[number], self.ends[number] = threading.Event(), threading.Event()

    def play(self, sampler: FakeSampler, number: int, step: int) -> Any:
        sampler.prompts.taken += 2
        with self.changed:
            self.began.append(number)
            self.changed.notify_all()
        sampler.recorder.phase("generating", 8)
        if number in self.lose:
            sampler.turns.prefetcher.await_restored()
        assert self.answered[number].wait(WAIT_S)
        sampler.on_done(6)
        assert self.ends[number].wait(WAIT_S)
        if step == 99:
            raise RunFailed("broken on purpose")
        return SimpleNamespace(number=number, metrics={})

    def until_began(self, numbers: list[int]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.began) >= len(numbers), WAIT_S)
        assert self.began == numbers

    def finish(self, *numbers: int) -> None:
        for number in numbers:
            self.answered[number].set()
            self.ends[number].set()


class Gone:
    """A pool whose server has lost weights that went by NCCL, until they are pushed again."""

    ready: Sequence[object] = ()

    @property
    def health(self) -> Gone:
        return self

    @property
    def wants_gather(self) -> bool:
        return not self.ready


@dataclass
class FakeSampler:
    """What stands in for `RoundSampler`."""

    script: Script
    args: Any
    plan: Any
    prompts: Any
    ranks: Ranks
    turns: Any = None
    recorder: Any = None
    stopwatch: Any = None
    progress: Any = None
    on_done: Any = None

    @property
    def positions(self) -> Positions:
        return {"": Position(self.prompts.taken, self.prompts.digest)}

    def sample(self, number: int, step: int) -> Any:
        return self.script.play(self, number, step)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def make_rounds(script: Script) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(
        staleness: int = 1,
        total: int = 10,
        step_size: int = 1,
        dynamic_sample: bool = False,
        lost: bool = False,
    ) -> Any:
        sampler = FakeSampler(
            script=script,
            args=SimpleNamespace(
                max_staleness=staleness, dynamic_sample=dynamic_sample, leads_turns=False
            ),
            plan=SimpleNamespace(rounds=total, optimizer_steps_per_round=step_size),
            prompts=SimpleNamespace(taken=0, digest=""),
            ranks=Ranks(0, 1, torch.device("cpu"), None),
        )
        pool = Gone()
        pool.ready = () if lost else ("one",)
        made.append(prefetch.Prefetcher(sampler, pool, lambda rollouts, _ranks: rollouts))
        return made[-1]

    yield make
    script.finish(*script.answered)  # what is under way ends now
    for rounds in made:
        rounds.close()


def test_a_round_begins_when_weights_are_fresh_enough_and_the_one_before_is_nearly_answered(
    script: Script, make_rounds: Callable[..., Any]
) -> None:
    rounds = make_rounds(staleness=1, total=4)
    rounds.allow(0, 0)
    script.until_began([0])
    script.answered[0].set()
    script.until_began([0, 1])  # before round 0 has ended, which has its prompts
    script.finish(0, 1)
    for number in (0, 1):
        rounds.wait(number, lambda _answered: None)
    assert script.began == [0, 1]  # round 2 would be two rounds behind
    assert rounds.take(0).number == 0 and rounds.positions[""].taken == 2
    rounds.allow(1, 1)
    script.until_began([0, 1, 2])
    # What round 2 has taken is not the trainer's yet: a run that is killed now takes it again.
    assert rounds.sampler.prompts.taken == 6
    rounds.take(1)
    assert rounds.positions[""].taken == 4
    script.finish(2, 3)
    rounds.allow(2, 2)
    script.until_began([0, 1, 2, 3])
    rounds.allow(3, 3)
    rounds.wait(3, lambda _answered: None)
    assert script.began == [0, 1, 2, 3]  # there is no fifth round


def test_with_dynamic_sampling_a_round_waits_for_the_end_of_the_one_before(
    script: Script, make_rounds: Callable[..., Any]
) -> None:
    rounds = make_rounds(staleness=3, dynamic_sample=True)
    rounds.allow(5, 5)  # a resumed run
    script.answered[5].set()
    script.until_began([5])
    with rounds._changed:
        assert rounds._changed.wait_for(lambda: rounds._rounds[5].answered == 6, WAIT_S)
    assert script.began == [5]
    script.finish(5)
    script.until_began([5, 6])


def test_what_ends_a_round_reaches_the_trainer_and_no_further_round_begins(
    script: Script, make_rounds: Callable[..., Any]
) -> None:
    rounds = make_rounds(staleness=5, step_size=99)
    rounds.allow(1, 1)  # its step is 99
    script.finish(1, 2)
    with pytest.raises(RunFailed, match="broken on purpose"):
        rounds.wait(1, lambda _answered: None)


def test_weights_that_are_to_be_gathered_again_are_left_to_the_trainers_thread(
    script: Script, make_rounds: Callable[..., Any]
) -> None:
    rounds = make_rounds(lost=True)
    script.lose = [0]
    rounds.allow(0, 0)
    with pytest.raises(GatherAgain):
        rounds.wait(0, lambda _answered: None)
    rounds.pool.ready = ("one",)
    script.finish(0, 1)
    rounds.wait(0, lambda _answered: None)


def test_the_end_of_a_run_calls_off_a_round_that_waits_for_its_server(
    script: Script, make_rounds: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    rounds = make_rounds(lost=True)
    script.lose = [0]
    rounds.allow(0, 0)
    script.until_began([0])
    rounds.close()
    assert not caplog.records and isinstance(rounds._rounds[0].fault, prefetch._Ended)
