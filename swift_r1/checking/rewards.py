"""What rewards do with made-up completions, called in processes that can be killed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.checking.completions import RIGHT, WRONG, MadeUp, hostile, made_up_batch, ordinary
from swift_r1.plugins import load_plugins
from swift_r1.rewards.pool import RewardPool
from swift_r1.rewards.types import RewardColumn

_HOSTILE_SECONDS = 1.0  # a completion; more where the reward is slow on ordinary ones
_EVERY = "every completion"


@dataclass(frozen=True, slots=True)
class RewardReport:
    """How one reward did.

    Attributes:
        ok: nothing here would break a run. Not every problem would.
        problems: one sentence each.
        values: kind of completion -> the value for each row; None is no opinion, NaN invalid.
        milliseconds: of a call with one group.
        tells_right: whether a right answer got more than the wrong one, in every row; None without a right answer.
    """

    name: str
    ok: bool
    problems: tuple[str, ...]
    values: Mapping[str, tuple[float | None, ...]]
    milliseconds: float
    tells_right: bool | None


def check_rewards(
    args: RlhfArguments,
    names: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    golds: Sequence[str | None],
    prefix: str = "",
) -> list[RewardReport]:
    """Calls each reward with one group a row, twice, and with a hostile group.

    Args:
        rows: preprocessed rows, at least one.
        golds: a right completion for each row, or None for all.
        prefix: what the model's turn begins with, which rewards see too.

    Raises:
        UsageError: a reward cannot be built in a worker process.
    """
    groups = [ordinary(gold) for gold in golds]
    batch = made_up_batch(rows, groups, args.max_completion_length, prefix)
    load = partial(load_plugins, args.external_plugins)
    with RewardPool(args, names, load) as pool:
        first, second = pool.score(batch), pool.score(batch)
    danger = [hostile()]
    dangerous = made_up_batch(rows[:1], danger, args.max_completion_length, prefix)
    reports = []
    for column, again in zip(first, second, strict=True):
        seconds = column.seconds / len(groups)
        limit = min(args.reward_timeout, max(_HOSTILE_SECONDS, 5 * seconds))
        limited = replace(args, reward_timeout=limit, reward_num_workers=1)
        with RewardPool(limited, [column.name], load) as pool:
            (hurt,) = pool.score(dangerous)
        reports.append(_report(column, again, groups, hurt, danger))
    return reports


def _report(
    column: RewardColumn,
    again: RewardColumn,
    groups: Sequence[Sequence[MadeUp]],
    hurt: RewardColumn,
    danger: Sequence[Sequence[MadeUp]],
) -> RewardReport:
    values = _by_kind(column, groups)
    problems = [f"{kind}: {cause}" for kind, cause in _causes(column, groups).items()]
    broken = bool(problems)
    if all(value is None for value in column.values):
        problems.append("no opinion on any completion")
    if any(_differ(one, other) for one, other in zip(column.values, again.values, strict=True)):
        problems.append("not deterministic: the same completions got other values the second time")
    causes = _causes(hurt, danger)
    if _EVERY not in causes:  # else said above already
        problems += [f"{kind} (hostile): {cause}" for kind, cause in causes.items() if kind != WRONG]
    tells = _tells_right(values)
    if tells is False:
        problems.append("does not give a right answer more than a wrong one")
    values |= {kind: found for kind, found in _by_kind(hurt, danger).items() if kind not in values}
    milliseconds = 1000 * column.seconds / len(groups)
    return RewardReport(column.name, not broken, tuple(problems), values, milliseconds, tells)


def _by_kind(column: RewardColumn, groups: Sequence[Sequence[MadeUp]]) -> dict[str, tuple[float | None, ...]]:
    found: dict[str, list[float | None]] = {}
    for one, value in zip((one for group in groups for one in group), column.values, strict=True):
        found.setdefault(one.kind, []).append(value)
    return {kind: tuple(some) for kind, some in found.items()}


def _causes(column: RewardColumn, groups: Sequence[Sequence[MadeUp]]) -> dict[str, str]:
    """The first cause of each kind that has an invalid value; one line where all of them have the same."""
    kinds = [one.kind for group in groups for one in group]
    causes: dict[str, str] = {}
    for bad in column.invalid:
        causes.setdefault(kinds[bad.index], bad.cause)
    if len(set(causes.values())) == 1 and set(causes) == set(kinds):
        return {_EVERY: next(iter(causes.values()))}
    return causes


def _tells_right(values: Mapping[str, Sequence[float | None]]) -> bool | None:
    if RIGHT not in values:
        return None
    pairs = zip(values[RIGHT], values[WRONG], strict=True)
    # A comparison with NaN is False.
    return all(right is not None and wrong is not None and right > wrong for right, wrong in pairs)


def _differ(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return one != other and not (math.isnan(one) and math.isnan(other))
