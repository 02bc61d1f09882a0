"""What `swift forecast` tries with a run's own parts: completions of its first prompts, their rewards, and two
optimizer steps on them. Nothing is kept but what is written into the folder at the end."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle, islice
from statistics import fmean
from typing import Any

from swift_r1.flags import Plan
from swift_r1.flags.forecast import (
    FORECAST_FILE,
    ForecastArguments,
    SampleArguments,
    prompts_at_a_time,
)
from swift_r1.record.metrics import standard_json
from swift_r1.record.recorder import Recorder
from swift_r1.rollout.prompts import Positions
from swift_r1.rollout.recheck import Recheck
from swift_r1.rollout.rounds import RoundSampler
from swift_r1.rollout.scoring import ScoredRound, completion_row, reward_metrics
from swift_r1.runtime.terminal import duration
from swift_r1.training.loop import Trainer
from swift_r1.training.memory import out_of_memory

logger = logging.getLogger("swift_r1.training")
_ASKED_AGAIN = 64  # completions, at least


def rehearse(trainer: Trainer, args: ForecastArguments) -> None:
    """Writes the folder's `completions.jsonl` and `forecast.json`. Collective."""
    sampler = trainer.rounds
    plan = trainer.plan
    steps = Steps()
    assert isinstance(sampler, RoundSampler)
    books = replace(trainer.books, recorder=steps)
    trial = Trial(**parts_of(trainer) | {"recorder": steps, "books": books})
    found = []
    parts = []
    for prompts, scored in sampled(trainer, args):
        seconds = trainer.stopwatch.take()
        parts.append(
            {
                "prompts": prompts,
                "generate": seconds["generate"],
                "reward": seconds.get("reward", 0.0),
            }
        )
        found += [] if scored is None else [scored]
    with trainer.ranks.busy():
        checked = _checked(found, trainer.books.recheck.get(""))
    trial.rounds = _Known(
        **parts_of(sampler) | {"known": _as_round(found, args.num_completions, plan)}
    )
    trainer.recorder.phase("optimizer steps", plan.total_steps)
    fault = None
    try:
        while trial.summary.steps < plan.total_steps:
            trial.train(trial.progress.open_round or trial.begin_round())
    except Exception as error:
        # The other ranks of several wait for this one, which must end.
        fault = out_of_memory(error)
        if fault is None or trainer.ranks.world_size > 1:
            raise
    trainer.recorder.phase_end()
    if not trainer.ranks.is_rank0:
        return
    rows = [
        completion_row(item, number) for number, one in enumerate(found) for item in one.trained
    ]
    trainer.recorder.completions(rows)
    content = {
        "parts": parts,
        "steps": steps.logged,
        "fault": fault,
        "invalid": _invalid(found),
        "checked": checked,
    }
    (trainer.books.run_dir / FORECAST_FILE).write_text(
        json.dumps(standard_json(content)) + "\n", encoding="utf-8"
    )


def sampled(
    trainer: Trainer, args: ForecastArguments | SampleArguments
) -> Iterator[tuple[int, ScoredRound | None]]:
    """Yields the completions and rewards of the first prompts that the run would take, a part of them at a time: how
    many prompts it has, and on rank 0 what became of them. Collective."""
    sampler = trainer.rounds
    plan = trainer.plan
    assert isinstance(sampler, RoundSampler)
    trainer.publish()
    trainer.device.to_generate()
    trainer.stopwatch.take()
    parts = prompts_at_a_time(args.num_prompts, args.num_completions, plan)
    count = sum(parts)
    trainer.recorder.phase("sampling", count * args.num_completions)
    began = time.monotonic()
    done = 0
    for number, prompts in enumerate(parts):
        own = replace(plan, prompts_per_round=prompts, num_generations=args.num_completions)
        scored = replace(sampler, plan=own, recorder=Recorder()).sample(number, 0)
        # what a log without a terminal sees
        before, done = done, done + prompts
        if scored is not None and (not before or 4 * before // count < 4 * done // count):
            left = (time.monotonic() - began) * (count - done) / done
            more = f", about {duration(left)} left" if done < count else ""
            logger.info("%d of %d prompts are answered and judged%s", done, count, more)
        yield prompts, scored
    trainer.recorder.phase_end()


class Trial(Trainer):
    """Trains, and saves nothing."""

    def save(self, last: bool, positions: Positions | None) -> None:
        """Nothing: these weights are of no use."""


class Steps(Recorder):
    """Keeps what every step logs."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def step(self, step: int, metrics: Mapping[str, float], last: bool) -> None:
        self.logged.append(dict(metrics))


@dataclass(frozen=True)
class _Known(RoundSampler):
    """Every round is this one; on rank 0."""

    known: ScoredRound | None = None

    def sample(self, number: int, step: int) -> ScoredRound | None:
        return self.known


def parts_of(whole: Trainer | RoundSampler) -> dict[str, Any]:
    """Returns what it was made of, to make another of."""
    return {one.name: getattr(whole, one.name) for one in fields(whole)}


def _as_round(found: Sequence[ScoredRound], size: int, plan: Plan) -> ScoredRound | None:
    """A round of the plan's size out of groups of `size` completions, repeated where they are too few; None of nothing.
    It has no calls of reward functions: whether they are valid is for the forecast to say."""
    if not found:
        return None
    wanted = plan.num_generations
    items = [item for one in found for item in one.trained]
    pieces = []
    for first in range(0, len(items), size):
        group = list(islice(cycle(items[first : first + size]), max(size, wanted)))
        pieces += [
            group[start : start + wanted] for start in range(0, len(group) - wanted + 1, wanted)
        ]
    chosen = islice(cycle(pieces), plan.prompts_per_round)
    trained = [
        replace(item, group=group, number=number)
        for group, piece in enumerate(chosen)
        for number, item in enumerate(piece)
    ]
    return ScoredRound(trained, [])


def _checked(found: Sequence[ScoredRound], recheck: Recheck | None) -> dict[str, float]:
    """Returns what the rewards say when they are asked again, and of equal completions: the mean of each metric of
    `Recheck`, and of `rewards/<name>/equal_differ`."""
    parts: list[dict[str, float]] = []
    asked = 0
    for scored in found:
        own = reward_metrics(scored.trained, scored.columns())
        parts.append({name: value for name, value in own.items() if name.endswith("/equal_differ")})
        if recheck is not None and asked < _ASKED_AGAIN:
            parts[-1] |= recheck.metrics(scored)
            asked += len(scored.trained)
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: fmean(one[name] for one in parts if name in one) for name in names}


def _invalid(found: Sequence[ScoredRound]) -> dict[str, dict[str, Any]]:
    bad = [
        (column.name, one.cause)
        for scored in found
        for column in scored.columns()
        for one in column.invalid
    ]
    names = dict.fromkeys(name for name, _ in bad)
    causes = {name: [cause for own, cause in bad if own == name] for name in names}
    return {name: {"count": len(own), "cause": own[0]} for name, own in causes.items()}
