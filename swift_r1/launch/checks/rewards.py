"""Made-up completions that every reward must bear (right, wrong, empty, very long, garbage, and hostile ones), and what
rewards do with them, called in processes that can be killed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from swift_r1.data.rows import RESERVED
from swift_r1.flags.run import RunFlags
from swift_r1.launch.checks.golds import wrong_completions
from swift_r1.plugins import load_plugins
from swift_r1.record.episodes import EpisodeCall, steps_of
from swift_r1.rewards.pool import RewardPool
from swift_r1.rewards.types import RewardBatch, RewardColumn, reward_batch

RIGHT = "right"
WRONG = "wrong"
OTHERS = "another row's"
EMPTY = "empty"
GARBAGE = "garbage"
OF_EPISODES = ("gym_reward", "agent_reward")  # what these judge is no made-up completion
_NO_IDEA = "<think>I do not know, so I guess.</think>\n<answer>wrong</answer>"
_LONG = "<think>" + "and then I try the next one, which is 7 " * 500
_GARBAGE = "\x00\ufffd\u202e</answer><answer>\\boxed{ {}%s {0} \n\n\u0661\u0662 \U0001f642 \u221a\u222b <|im_end|>"
# What makes a careless reward hang or break: one group, whose first completion is harmless.
_HOSTILE = {
    WRONG: _NO_IDEA,
    "9**9**9": "<think></think>\n<answer>9**9**9</answer>",
    "brackets": "<think></think>\n<answer>" + "(" * 100_000 + "</answer>",
}
_HOSTILE_SECONDS = 1.0  # a completion; more where the reward is slow on ordinary ones
_MAY_BE_RIGHT = " (made up; a method wrong(row) of the reward gives a better one)"
_EVERY = "every completion"
_ANSWER = re.compile(r"(<answer>).*?(</answer>)|(\\boxed\{).*?(\})", re.DOTALL)


class MadeUpInfos(dict[str, Any]):
    """A scheduler's notes: their names are not known here, so every name has the value 0."""

    def __missing__(self, name: str) -> int:
        return 0


def ordinary(
    golds: Sequence[str | None], own: Mapping[str, Sequence[str]] | None = None
) -> list[dict[str, str]]:
    """Returns what a model may well say: a group for each row.

    Args:
        golds: a right completion for each row, or None for all. That of another row is a wrong one, which may be right
            by chance.
        own: name of a reward -> the wrong completions that it gives, one for each row.
    """
    groups = []
    for row, gold in enumerate(golds):
        group = {WRONG: _NO_IDEA}
        if gold is not None:
            wrong = made_wrong(gold)
            other = next((one for one in golds if one is not None and one != gold), wrong)
            group = {RIGHT: gold, WRONG: wrong, OTHERS: other}
        group |= {EMPTY: "", "long": _LONG, GARBAGE: _GARBAGE}
        groups.append(group | {_own(name): texts[row] for name, texts in (own or {}).items()})
    return groups


def _own(name: str) -> str:
    """Names the kind of completion that a reward's `wrong(row)` gives."""
    return f"{WRONG} of {name}"


def made_wrong(gold: str) -> str:
    """Makes a right completion wrong and keeps its form: every number of the answer one larger, else another answer."""
    found = _ANSWER.search(gold)
    start, end = found.span() if found else (0, len(gold))
    answer = gold[start:end]
    if re.search(r"\d", answer):
        changed = re.sub(r"[0-9]+", lambda digits: str(int(digits[0][:18]) + 1), answer)
    elif found:
        changed = "".join((found[1] or found[3], "wrong", found[2] or found[4]))
    else:
        changed = "wrong"
    return gold[:start] + changed + gold[end:]


def made_up_batch(
    rows: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, str]],
    args: RunFlags,
    prefix: str = "",
) -> RewardBatch:
    """Makes the call that a training step would make: group `g` answers row `g`, and every column is there. Token ids
    are made up, one per byte.

    Args:
        rows: preprocessed rows, one per group.
        groups: of equal sizes, the text of each kind of completion (`right`, `wrong`, `empty`, ...).
        prefix: what the model's turn begins with; a text that begins with it already stays as it is.
    """
    pairs = [
        (row, text) for row, group in zip(rows, groups, strict=True) for text in group.values()
    ]
    begins = prefix.strip()
    pairs = [
        (row, text if text.lstrip().startswith(begins) else prefix + text) for row, text in pairs
    ]
    names = sorted({name for row in rows for name in row} - RESERVED - {"messages"})
    longest = args.max_completion_length
    talks = [[*row["messages"], {"role": "assistant", "content": text}] for row, text in pairs]
    ids = [list(text.encode("utf-8", "replace")) for _, text in pairs]
    steps = {}
    if args.takes_turns:
        steps["episode_steps"] = [
            _only_step(talk, len(some)) for talk, some in zip(talks, ids, strict=True)
        ]
    return reward_batch(
        [text for _, text in pairs],
        [row for row, _ in pairs],
        names,
        len(groups[0]),
        {"global_step": 0, "max_steps": 1},
        messages=talks,
        prompt_id=[row["prompt_id"] for row, _ in pairs],
        request_id=[f"check-{number}" for number in range(len(pairs))],
        dataset=[row["dataset"] for row, _ in pairs],
        finish_reason=["length" if len(some) > longest else "stop" for some in ids],
        response_token_ids=[some[:longest] for some in ids],
        rollout_infos=[MadeUpInfos(num_turns=1, total_reward=0.0) for _ in pairs],
        **steps,
        **{
            name: [value] * len(pairs)
            for name, value in (("num_turns", 1), ("tool_calls", []))
            if name not in names
        },
    )


def _only_step(messages: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Returns the step of an episode of one call."""
    call = EpisodeCall("new", None, 0, len(messages) - 1, 1, tokens, "stop")
    return steps_of([call], [messages])


@dataclass(frozen=True, slots=True)
class RewardReport:
    """How one reward did.

    Attributes:
        ok: nothing here would break a run, which not every problem does.
        problems: one sentence each.
        values: kind of completion -> the value for each row; None is no opinion, NaN invalid.
        milliseconds: of a call with one group.
        tells_right: whether the right answer got more than a wrong one in some row; None without a right answer.
    """

    name: str
    ok: bool
    problems: tuple[str, ...]
    values: Mapping[str, tuple[float | None, ...]]
    milliseconds: float
    tells_right: bool | None


def try_rewards(
    args: RunFlags,
    names: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    golds: Sequence[str | None],
    prefix: str = "",
) -> list[RewardReport]:
    """Calls each reward with one group per row, twice, and with a hostile group; one that cannot score any completion
    of the first row only with that row's, since each call may take its whole time limit.

    Args:
        rows: preprocessed rows, at least one.
        golds: a right completion for each row, or None for all.
        prefix: what the model's turn begins with, which rewards see too.

    Raises UsageError where a reward cannot be built in a worker process, or its `wrong(row)` fails.
    """
    groups = ordinary(golds, wrong_completions(names, rows, golds, args))
    batch = made_up_batch(rows, groups, args, prefix)
    dangerous = made_up_batch(rows[:1], [_HOSTILE], args, prefix)
    load = partial(load_plugins, args.external_plugins)
    with RewardPool(args, names, load) as pool:
        tried = pool.score(made_up_batch(rows[:1], groups[:1], args, prefix))
        working = [column.name for column in tried if len(column.invalid) < len(groups[0])]
        first, second = (_score(pool, batch, working) for _ in range(2))
        hurts = []
        for column in first:
            seconds = column.seconds / len(groups)
            pool.timeout = min(args.reward_timeout, max(_HOSTILE_SECONDS, 5 * seconds))
            hurts += _score(pool, dangerous, [column.name])
    ids = [str(row["prompt_id"]) for row, group in zip(rows, groups, strict=True) for _ in group]
    reports = {
        column.name: _report(column, column, None, groups[:1], ids, 1000 * column.seconds)
        for column in tried
        if column.name not in working
    }
    for column, again, hurt in zip(first, second, hurts, strict=True):
        milliseconds = 1000 * column.seconds / len(groups)
        reports[column.name] = _report(column, again, hurt, groups, ids, milliseconds)
    return [reports[name] for name in names]


def _score(pool: RewardPool, batch: RewardBatch, names: Sequence[str]) -> list[RewardColumn]:
    calls = pool.open(batch.trainer_state, names)
    calls.add(0, batch)
    return calls.result()[1]


def _report(
    column: RewardColumn,
    again: RewardColumn,
    hurt: RewardColumn | None,
    groups: Sequence[Mapping[str, str]],
    ids: Sequence[str],
    milliseconds: float,
) -> RewardReport:
    kinds = [kind for group in groups for kind in group]
    values = _by_kind(column, kinds)
    problems = [f"{kind}: {cause}" for kind, cause in _causes(column, kinds, ids).items()]
    broken = bool(problems)
    if all(value is None for value in column.values):
        problems.append("no opinion on any completion")
    if any(_differ(one, other) for one, other in zip(column.values, again.values, strict=True)):
        problems.append("not deterministic: the same completions got other values the second time")
    hostile = {} if hurt is None else _causes(hurt, list(_HOSTILE), ())
    if _EVERY not in hostile:  # else said above already
        problems += [
            f"{kind} (hostile): {cause}" for kind, cause in hostile.items() if kind != WRONG
        ]
    by_row = [dict(zip(values, found, strict=True)) for found in zip(*values.values(), strict=True)]
    tells = any(tells_right(column.name, found) for found in by_row) if RIGHT in values else None
    wrong = own if (own := _own(column.name)) in values else WRONG
    blind = [
        (ids[row * len(values)], group)
        for row, (group, found) in enumerate(zip(groups, by_row, strict=True))
        if tells is not None and not more(found[RIGHT], found[wrong])
    ]
    if blind:
        row, group = blind[0]
        problems.append(
            f"does not give a right answer more than a wrong one in {len(blind)} of {len(groups)} rows, the first is "
            f"{row}: right {group[RIGHT]!r}, wrong {group[wrong]!r}{_MAY_BE_RIGHT * (wrong == WRONG)}"
        )
    earned = [value for value in values[EMPTY] if value is not None and value > 0]
    if earned and tells is not False:
        problems.append(f"gives an empty completion {max(earned):g}")
    if hurt is not None:
        values |= {
            kind: found
            for kind, found in _by_kind(hurt, list(_HOSTILE)).items()
            if kind not in values
        }
    return RewardReport(column.name, not broken, tuple(problems), values, milliseconds, tells)


def _by_kind(column: RewardColumn, kinds: Sequence[str]) -> dict[str, tuple[float | None, ...]]:
    pairs = list(zip(kinds, column.values, strict=True))
    return {kind: tuple(value for one, value in pairs if one == kind) for kind in kinds}


def _causes(column: RewardColumn, kinds: Sequence[str], ids: Sequence[str]) -> dict[str, str]:
    """Returns the first cause of each kind that has an invalid value, with its row where it is not that of all (`ids`);
    one line where all kinds have the same."""
    causes: dict[str, str] = {}
    some = len({ids[bad.index] for bad in column.invalid}) < len(set(ids)) if ids else False
    for bad in column.invalid:
        causes.setdefault(
            kinds[bad.index], f"row {ids[bad.index]}: {bad.cause}" if some else bad.cause
        )
    if len(set(causes.values())) == 1 and set(causes) == set(kinds):
        return {_EVERY: next(iter(causes.values()))}
    return causes


def tells_right(name: str, values: Mapping[str, float | None]) -> bool:
    """Says whether the reward `name` gave the right completion of a row more than a wrong one: its own, else any, since
    each may be right by chance: a number within a tolerance, a query with the same result."""
    own = _own(name)
    wrong = (own,) if own in values else (WRONG, OTHERS, EMPTY, GARBAGE)
    return any(more(values[RIGHT], values[kind]) for kind in wrong)


def more(right: float | None, wrong: float | None) -> bool:
    """Says whether one value is more than another; an invalid one and no opinion never are."""
    return right is not None and wrong is not None and right > wrong


def _differ(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return one != other and not (math.isnan(one) and math.isnan(other))
