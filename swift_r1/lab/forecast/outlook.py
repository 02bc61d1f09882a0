"""The figures of a forecast, from the completions and the times that its rehearsal wrote."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any, Literal

from swift_r1.algorithms.methods import ESTIMATORS
from swift_r1.algorithms.rewards import sample_std
from swift_r1.flags.plan import Plan
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.lab.diagnosis.trend import TOLD
from swift_r1.lab.forecast.statistics import (
    least_rise,
    markers_of,
    repeated_share,
    round_error,
    rounds_of_sampling,
    rounds_to_tell,
    signal_probability,
    signal_share,
    steps_without_signal,
)
from swift_r1.rewards.types import RIGHT
from swift_r1.training.evaluation.statistics import MeanEstimate, mean_estimate, wilson

SIZES = (4, 8, 16)  # of groups, beside the run's own
Row = Mapping[str, Any]  # of completions.jsonl


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """Figures of one prompt; `low` and `high` are Wilson's 95 % interval of its pass rate."""

    prompt_id: str
    passed: int
    completions: int
    low: float
    high: float
    reward: float  # the mean of those that can be used; NaN without one
    signal: float  # chance that a group of the run's size has a signal
    truncated: float
    tokens: float


@dataclass(frozen=True, slots=True)
class RewardFigures:
    """Figures of one reward function. Shares are of all completions; `differing` is of the prompts."""

    name: str
    mean: float
    # the least and the largest value; NaN without one
    least: float
    largest: float
    positive: float  # above 0
    silent: float  # no opinion
    invalid: float
    cause: str  # of the first invalid one
    differing: float  # completions of one prompt got different values
    std: float  # over all completions
    teaches: bool  # its weight is not 0
    # asked again about the same completions: the share that got another value, and the share of the variance that is
    # chance; of completions that equal an earlier one of their prompt, the share that got another value than it; None
    # where that was not asked, or there were none
    changed: float | None
    noise: float | None
    equal_differ: float | None

    @property
    def constant(self) -> bool:
        return not self.least < self.largest


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of an optimizer step, by what they go to; its training and what follows from it are None where `fault`
    says why there is none."""

    seconds: Mapping[str, float]
    step: float | None
    hours: float | None  # of the plan, without start, evaluations and checkpoints
    answer: float  # seconds of one completion and its rewards
    tokens: float  # generated for a step
    peak_gib: float | None  # that one rank held
    fault: str | None


@dataclass(frozen=True, slots=True)
class Power:
    """What the rounds of the run will tell about its reward, by the arithmetic of `swift why`."""

    reward: float  # mean of the base model
    error: float  # standard error of a round's mean; NaN where it is not known
    rise: float  # worth knowing: a tenth of a completion's standard deviation
    rounds: int | None  # that tell it
    planned: int
    least: float  # rise that those tell; NaN of too few
    best: float  # mean over prompts of the best completion of each: what choosing among these would earn


@dataclass(frozen=True, slots=True)
class Outlook:
    """All figures of a forecast. Shares are from 0 to 1; an estimate's interval is over prompts."""

    prompts: Sequence[PromptFigures]
    completions: int  # of each
    passes: MeanEstimate  # share of completions to which the first reward function gives 1 or more
    # by the size of a group; None where too few completions were sampled; empty where the run compares whole steps
    signal: Mapping[int, MeanEstimate | None]
    own_size: int  # of the run's groups; of its optimizer steps where it compares these
    # of those; of the largest groups that could be looked at where they are larger
    own_signal: MeanEstimate
    # the same by the first reward function alone: what is left once the others are learned
    task_signal: MeanEstimate
    groups_per_step: float
    silent_steps: float  # share of optimizer steps in which no group has a signal
    rewards: Sequence[RewardFigures]  # the first one says what passes
    truncated: MeanEstimate
    passes_ended: float | None  # pass rate of completions that ended by themselves
    markers: Sequence[str]  # that the first prompt asks for
    unmarked: float  # share of completions that lack one of them
    passes_marked: float | None
    repeated: float
    power: Power
    cost: Cost

    def share_of_prompts(self, passed: Literal["none", "all"]) -> float:
        """Returns the share of prompts of which none or all completions pass."""
        return _mean(
            [
                float(one.passed == (one.completions if passed == "all" else 0))
                for one in self.prompts
            ]
        )


def outlook(
    rows: Sequence[Row],
    found: Mapping[str, Any],
    args: RlhfArguments,
    plan: Plan,
) -> Outlook:
    """Returns the figures from the rows of `completions.jsonl` and the content of `forecast.json`."""
    groups = [
        list(group) for _, group in groupby(rows, key=lambda row: (row["step"], row["group"]))
    ]
    first = f"rewards/{args.reward_funcs[0]}"
    size = plan.num_generations
    count = len(groups[0])
    weighed = args.multi_objective_aggregation == "sum_then_normalize"
    teaching = [
        name
        for name, weight in zip(args.reward_funcs, args.reward_weights or [], strict=True)
        if weight
    ]
    keys = [[_key(row, None if weighed else teaching) for row in group] for group in groups]
    compared = args.rlhf_type == "grpo" and ESTIMATORS[args.advantage_estimator].baseline == "group"
    signal = {one: signal_share(keys, one) for one in sorted({*SIZES, size})} if compared else {}
    own = signal.get(size) or signal_share(keys, min(size, count))
    per_step = plan.completions_per_optimizer_step
    task = signal_share([[row[first] for row in group] for group in groups], min(size, count))
    assert own is not None and task is not None
    if not compared:
        own = _of_all(keys, per_step)
        task = _of_all([[row[first] for row in group] for group in groups], per_step)
    per_step_groups = per_step / size if compared else 1.0
    markers = markers_of(groups[0][0]["prompt"])
    marked = [all(marker in row["completion"] for marker in markers) for row in rows]
    ended = [row["finish_reason"] != "length" for row in rows]
    right = [_passes(row, first) for row in rows]
    rewards = [_reward(name, groups, found, name in teaching) for name in args.reward_funcs]
    means = [sum(_passes(row, first) for row in group) / count for group in groups]
    cut = [sum(row["finish_reason"] == "length" for row in group) / count for group in groups]
    return Outlook(
        prompts=[
            _prompt(group, first, own_keys, min(size, count))
            for group, own_keys in zip(groups, keys, strict=True)
        ],
        completions=count,
        passes=mean_estimate(means, count),
        signal=signal,
        own_size=size if compared else per_step,
        own_signal=own,
        task_signal=task,
        groups_per_step=per_step_groups,
        silent_steps=steps_without_signal(own.value, per_step_groups),
        rewards=rewards,
        truncated=mean_estimate(cut, count),
        passes_ended=_share(right, ended),
        markers=markers,
        unmarked=1 - sum(marked) / len(rows),
        passes_marked=_share(right, marked),
        repeated=repeated_share([[row["completion"] for row in group] for group in groups]),
        power=_power(groups, rewards, plan),
        cost=_cost(rows, found, args, plan, own.value if compared else 1.0, count),
    )


def _of_all(groups: Sequence[Sequence[Hashable | None]], size: int) -> MeanEstimate:
    """Returns the chance of a signal among `size` completions of whatever prompts; without an interval."""
    everything = [reward for group in groups for reward in group]
    chance = signal_probability(everything, min(size, len(everything)))
    return MeanEstimate(chance, math.nan, math.nan, math.nan)


def _key(row: Row, names: Sequence[str] | None) -> Hashable:
    """Returns what must differ within a group for a signal: the reward, or with GDPO any function's; None if
    unusable."""
    if names is None or row["reward"] is None:
        return row["reward"]  # type: ignore[no-any-return]
    return tuple(row[f"rewards/{name}"] for name in names)


def _passes(row: Row, first: str) -> bool:
    return row[first] is not None and row[first] >= RIGHT


def _share(of: Sequence[bool], among: Sequence[bool]) -> float | None:
    chosen = [one for one, is_chosen in zip(of, among, strict=True) if is_chosen]
    return sum(chosen) / len(chosen) if chosen else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _prompt(
    group: Sequence[Row],
    first: str,
    keys: Sequence[Hashable],
    size: int,
) -> PromptFigures:
    count = len(group)
    passed = sum(_passes(row, first) for row in group)
    return PromptFigures(
        group[0]["prompt_id"],
        passed,
        count,
        *wilson(passed / count, count),
        reward=_mean([row["reward"] for row in group if row["reward"] is not None]),
        signal=signal_probability(keys, size),
        truncated=_mean([float(row["finish_reason"] == "length") for row in group]),
        tokens=_mean([row["tokens"] for row in group]),
    )


def _power(groups: Sequence[Sequence[Row]], rewards: Sequence[RewardFigures], plan: Plan) -> Power:
    usable = [[row["reward"] for row in group if row["reward"] is not None] for group in groups]
    known = [group for group in usable if group]
    error = round_error(known, plan.prompts_per_round, plan.num_generations)
    rise = TOLD * (_mean([one.std for one in rewards]) or 0.5)
    return Power(
        reward=_mean([value for group in known for value in group]),
        error=error,
        rise=rise,
        rounds=None if math.isnan(error) else rounds_to_tell(error, rise),
        planned=plan.rounds,
        least=least_rise(error, plan.rounds),
        best=_mean([max(group) for group in known]),
    )


def _reward(
    name: str,
    groups: Sequence[Sequence[Row]],
    found: Mapping[str, Any],
    teaches: bool,
) -> RewardFigures:
    bad = found["invalid"].get(name)
    checked = found.get("checked", {})  # of an older version there is nothing
    values = [
        [row[f"rewards/{name}"] for row in group if row[f"rewards/{name}"] is not None]
        for group in groups
    ]
    known = [value for group in values for value in group]
    count = sum(map(len, groups))
    invalid = bad["count"] if bad else 0
    return RewardFigures(
        name,
        mean=_mean(known),
        least=min(known, default=math.nan),
        largest=max(known, default=math.nan),
        positive=sum(value > 0 for value in known) / count,
        silent=(count - len(known) - invalid) / count,
        invalid=invalid / count,
        cause=bad["cause"] if bad else "",
        differing=sum(len(set(group)) > 1 for group in values) / len(groups),
        std=sample_std(known),
        teaches=teaches,
        changed=checked.get(f"recheck/{name}/changed"),
        noise=checked.get(f"recheck/{name}/noise"),
        equal_differ=checked.get(f"rewards/{name}/equal_differ"),
    )


def _cost(
    rows: Sequence[Row],
    found: Mapping[str, Any],
    args: RlhfArguments,
    plan: Plan,
    signal: float,
    count: int,
) -> Cost:
    times = rounds_of_sampling(signal, args.max_resample_times) if args.dynamic_sample else 1.0
    updates = plan.optimizer_steps_per_round
    generated = times * plan.completions_per_round / updates  # completions for a step
    # The first part pays for what an engine does once, where there are others.
    parts = found["parts"][1:] or found["parts"]
    each = {
        name: median(part[name] / (part["prompts"] * count) for part in parts)
        for name in ("generate", "reward")
    }
    seconds = {name: generated * one for name, one in each.items()}
    answer = sum(each.values())
    tokens = generated * _mean([row["tokens"] for row in rows])
    if found["fault"] is not None:
        return Cost(seconds, None, None, answer, tokens, None, found["fault"])
    # the first step pays for memory
    before = seconds["generate"] + seconds["reward"]
    last = found["steps"][-1]
    seconds["train"] = last["time/train"]
    for name in ("sync", "sleep", "offload"):  # once a round
        logged = [one.get(f"time/{name}", 0.0) for one in found["steps"]]
        if f"time/{name}" in last:
            seconds[name] = min(filter(None, logged), default=0.0) / updates
    after = math.fsum(seconds.values()) - before
    ahead = args.async_generate and args.max_staleness
    step = max(before, after) if ahead else before + after
    return Cost(
        seconds,
        step,
        step * plan.total_steps / 3600,
        answer,
        tokens,
        last["memory/peak_gib"],
        None,
    )
