"""The verdict of a forecast, and the changes that would help most, each with its evidence.

The thresholds and their reasons are in docs/forecast.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.lab.diagnosis.causes import EQUAL_DIFFER, NEVER, NOISE, RIGHT_ANSWERS, WARM_START
from swift_r1.lab.diagnosis.past import ANSWERS_FIRST
from swift_r1.lab.forecast.outlook import Outlook
from swift_r1.lab.forecast.statistics import rounds_of_sampling
from swift_r1.training.evaluation.statistics import MeanEstimate

LITTLE = 0.1  # share of groups with a signal below which most of what is generated is for nothing
IDLE_STEPS = 0.5  # share of optimizer steps without any signal
DONE = 0.9  # pass rate from which on little is left to learn
MANY = 0.2  # share of completions that are cut off, or lack what the prompt asks for
MOST = 0.5  # the same; and of completions that repeat others
GAIN = 1.3  # times as many groups with a signal, for which larger groups are worth their price
HARD = 0.5  # share of prompts of which no completion passes
SHOWN = 2  # changes

Level = Literal[
    "nothing to learn from",
    "reward is noise",
    "hardly anything to learn from",
    "learnable",
    "learned already",
    "beside the task",
]


@dataclass(frozen=True, slots=True)
class Improvement:
    """A change that would help, what says so, and the commands of it that can be told."""

    kind: str
    evidence: str
    advice: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ForecastVerdict:
    level: Level
    text: str
    changes: tuple[Improvement, ...]  # the most helpful first


def percent(share: float) -> str:
    """Writes a share in two digits, and never as 0 or 100 what is not that."""
    if 0 < share < 0.001:
        return "under 0.1 %"
    return "over 99.9 %" if 0.999 < share < 1 else f"{100 * share:.{2 if share < 0.995 else 3}g} %"


def interval(one: MeanEstimate) -> str:
    if math.isnan(one.low):
        return "no interval"
    return f"95 %: {100 * one.low:.1f} to {100 * one.high:.1f}"


def verdict(
    found: Outlook, args: RlhfArguments, warm_start: Sequence[str] = (), answered: bool = False
) -> ForecastVerdict:
    """Returns the level, in a sentence with its evidence, and what to change. `warm_start` are its commands, `answered`
    says whether the rows have answers to learn."""
    level = level_of(found)
    task = found.rewards[0]
    own = found.own_signal
    others = ", ".join(one.name for one in found.rewards[1:] if one.differing)
    what = f"{percent(own.value)} of the groups of {found.own_size} have a signal ({interval(own)})"
    if found.signal.get(found.own_size, own) is None:
        what = f"of groups of {found.own_size} at least {percent(own.value)} have a signal ({interval(own)})"
    if task.differing and others and found.task_signal.value < own.value:
        what += f", by {task.name} alone {percent(found.task_signal.value)}, which is what is left once {others} is learned"
    if found.silent_steps >= 0.005:
        what += f", and in {percent(found.silent_steps)} of the optimizer steps none has"
    noise = next(_noises(found), "")
    texts: dict[Level, str] = {
        "nothing to learn from": f"none of {len(found.prompts)} groups of {found.completions} has rewards that differ: "
        f"nothing would be updated ({interval(own)})",
        "reward is noise": f"{noise}; {what}",
        "hardly anything to learn from": what,
        "beside the task": f"{task.name} never differs within a group; what is learned is {others} alone ({what})",
        "learned already": f"{percent(found.passes.value)} of the completions pass already ({interval(found.passes)}); "
        + what,
        "learnable": what,
    }
    warm = [*_warm_start(found, warm_start, answered)] if level != "learned already" else []
    changes = [*warm * answered, *_changes(found, args, level), *warm * (not answered)]
    changes.sort(
        key=lambda one: one.kind not in ("invalid", "noise")
    )  # what breaks or blinds the run
    return ForecastVerdict(level, f"{level}: {texts[level]}", tuple(changes))


def level_of(found: Outlook) -> Level:
    own = found.own_signal.value
    task = found.rewards[0]
    if not own:
        return "learned already" if found.passes.value >= DONE else "nothing to learn from"
    if any(_noises(found)):
        return "reward is noise"
    if found.passes.value >= DONE and own < 1 - LITTLE:
        return "learned already"
    if not task.differing:
        return "beside the task"
    return (
        "hardly anything to learn from"
        if own < LITTLE or found.silent_steps > IDLE_STEPS
        else "learnable"
    )


def _noises(found: Outlook) -> Iterator[str]:
    """Yields what says of a function that its values are chance, of those that teach."""
    for one in found.rewards:
        if one.teaches and one.noise is not None and one.noise >= NOISE:
            yield (
                f"asked again about the same completions, {one.name} gives {percent(one.changed or 0.0)} of them another "
                f"value: {percent(one.noise)} of its variance is chance"
            )
        elif one.teaches and one.equal_differ is not None and one.equal_differ >= EQUAL_DIFFER:
            yield (
                f"{percent(one.equal_differ)} of the completions that equal another of their prompt get another value "
                f"from {one.name}"
            )


def _warm_start(found: Outlook, commands: Sequence[str], answered: bool) -> Iterator[Improvement]:
    """Yields it where next to nothing earns anything."""
    task = found.rewards[0]
    if task.positive <= NEVER and not math.isnan(task.mean):
        yield Improvement(
            "warm start",
            f"{percent(task.positive)} of the {len(found.prompts) * found.completions:,} completions earn something from "
            f"{task.name}",
            f"{ANSWERS_FIRST}; or {RIGHT_ANSWERS}" if answered else WARM_START,
            tuple(commands),
        )


def _changes(found: Outlook, args: RlhfArguments, level: Level) -> Iterator[Improvement]:
    """Yields the most helpful first: what would stop the run, what makes rewards blind, what makes them rare, what is
    only slow."""
    for one in found.rewards:
        if one.invalid > args.max_invalid_reward_ratio:
            yield Improvement(
                "invalid",
                f"{one.name} is invalid on {percent(one.invalid)} of the completions: {one.cause}",
                "mend it, or the run is stopped (--max_invalid_reward_ratio); `swift check` tries it too",
            )
    for noise in _noises(found):
        yield Improvement(
            "noise",
            noise,
            "a reward that says the same of the same completion: judge at temperature 0, the mean of several judgements, "
            "no time limits within the function",
        )
    if found.truncated.value >= MANY:
        passing = (
            ""
            if found.passes_ended is None
            else f"; of those that ended {percent(found.passes_ended)} pass"
        )
        yield Improvement(
            "truncated",
            f"{percent(found.truncated.value)} of the completions are cut off at {args.max_completion_length} tokens"
            + passing,
            f"longer completions: --max_completion_length {2 * args.max_completion_length}"
            + ("" if found.truncated.value < MOST else ", or a prompt that asks for less"),
        )
    if level != "learned already":
        yield from _about_the_task(found)
    if found.passes.value >= DONE:
        yield Improvement(
            "easy",
            f"all {found.completions} completions of {percent(found.share_of_prompts('all'))} of the prompts pass",
            "harder rows, or a reward that tells right answers apart",
        )
    if args.rlhf_type == "grpo" and level != "learned already":
        yield from _about_groups(found, args)
    if found.repeated >= MOST:
        yield Improvement(
            "repeated",
            f"{percent(found.repeated)} of the completions say word for word what another of their prompt says",
            f"a higher --temperature than {args.temperature:g}, if answers are not as short as that by nature",
        )


_LOOK = {
    "agent_reward": "it is what the agent returns; of an environment `swift check --env` plays episodes",
    "gym_reward": "it is what the environment of --gym_env returns",
}


def _about_the_task(found: Outlook) -> Iterator[Improvement]:
    task = found.rewards[0]
    constant = [one for one in found.rewards if one.constant and one.invalid < 1]
    lacking = found.unmarked >= MOST and (found.passes_marked or 0.0) >= found.passes.value
    if lacking:
        marked = (
            ""
            if not found.passes_marked
            else f"; {percent(found.passes_marked)} of the others pass"
        )
        yield Improvement(
            "format",
            f"{percent(found.unmarked)} of the completions lack {' or '.join(found.markers)}, which the prompt asks for"
            + marked,
            "a solved example in the prompt (one shot), a --response_prefix that begins the form, or a reward for it",
        )
    for one in constant:
        yield Improvement(
            "constant",
            f"{one.name} gave {one.largest:g} to every completion"
            if one.least == one.largest
            else f"{one.name} had no opinion on any completion",
            "look whether it can give anything else: "
            + _LOOK.get(one.name, "`swift check --gold` calls it with a right answer")
            + (
                "; if it can, easier rows or a stronger model"
                if one is task and not found.passes.value
                else ""
            ),
        )
    unsolved = found.share_of_prompts("none")
    if unsolved >= HARD and not task.constant:
        yield Improvement(
            "hard",
            f"no completion of {percent(unsolved)} of the prompts passes; of the others "
            f"{percent(found.passes.value / (1 - unsolved)) if unsolved < 1 else 'there are none'} do",
            "easier rows, or those that pass now and then (the JSON of --json names them), and the others later",
        )


def _about_groups(found: Outlook, args: RlhfArguments) -> Iterator[Improvement]:
    own = found.own_signal
    larger = [
        (size, one)
        for size, one in found.signal.items()
        if one is not None and size > found.own_size and one.value >= GAIN * own.value > 0
    ]
    if larger:
        size, one = larger[-1]
        yield Improvement(
            "groups",
            f"groups of {size} have a signal {one.value / own.value:.1f} times as often ({percent(one.value)}, "
            f"{interval(one)})",
            f"more completions per prompt: --num_generations {size}, and a batch larger by the same factor",
        )
    if 0 < own.value < MOST and not args.dynamic_sample:
        times = rounds_of_sampling(own.value, args.max_resample_times)
        yield Improvement(
            "resample",
            f"{percent(1 - own.value)} of what is generated trains nothing",
            f"--dynamic_sample true replaces groups without signal, for {times:.1f} times the generation",
        )
