"""Right completions of rows, by which rewards are seen to tell right from wrong: `--gold` filled in, what the plugin's
`gold(row)` gives, or what the built-in rewards ask for; and wrong ones that rewards themselves give."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import permutations
from typing import Any

from swift_r1.data.preprocessors import Row
from swift_r1.errors import UsageError, a_kind, describe
from swift_r1.plugins import LoadedPlugin
from swift_r1.rewards.graders.answers import answered, written_answer
from swift_r1.rewards.orm import Reward, build_reward, is_built_in, orms

COMPARING = ("gsm8k", "math", "math_tag", "math_tag_strict", "accuracy", "cosine")
"""The built-in rewards that compare an answer with the column `solution`."""
_NUMBER = re.compile(r"-?[0-9](?:[0-9,.]*[0-9])?")
# working, or an answer in a sentence
_SENTENCE = re.compile(r"(?:(?<!\\)\b[A-Za-z]{2,}[^A-Za-z\\{}]+){3}")
_SECONDS = 20.0  # for the golds of a reward
_SHOWN = 3
_LONGEST = 60
_PART = re.compile(r"\{(\w+)[\[.:!][^{}]*\}")
_MOST_NUMBERS = 4  # of a Countdown problem that is searched for a solution


def right_completions(
    template: str | None,
    plugins: Sequence[LoadedPlugin],
    rewards: Sequence[str],
    rows: Sequence[Row],
) -> list[str | None]:
    """Returns a right completion for each row, all None where none is known.

    Raises UsageError: the template names a column that the data lacks, or the plugin's function fails.
    """
    if template is not None:
        return [_filled(template, row) for row in rows]
    functions = (getattr(plugin.module, "gold", None) for plugin in plugins)
    function = next((gold for gold in functions if callable(gold)), None)
    if function is not None:
        return [_of_plugin(function, row) for row in rows]
    built_in = all(map(is_built_in, rewards)) and not {*COMPARING, "countdown"}.isdisjoint(rewards)
    golds = [built_in_gold(row) for row in rows] if built_in else []
    return list(golds) if golds and None not in golds else [None] * len(rows)


def built_in_gold(row: Mapping[str, Any]) -> str | None:
    """Returns a completion in the form `format` that answers a row rightly; None where the row has no answer."""
    solution = row.get("solution")
    if solution is None:
        reached = _reached(row) if {"nums", "target"} <= row.keys() else None
        return None if reached is None else f"<think>\n</think> <answer>{reached}</answer>"
    if isinstance(solution, list):
        solution = solution[0] if solution else ""
    text = answered(str(solution)).rpartition("####")[2]
    answer = written_answer(text) or text
    numbers = _NUMBER.findall(answer)
    if numbers and _SENTENCE.search(answer):
        answer = numbers[-1]
    return f"<think>\n</think> <answer>\\boxed{{{answer.strip()}}}</answer>"


def unreadable_golds(rewards: Sequence[str], rows: Sequence[Row], args: Any) -> list[str]:
    """Returns a line for each built-in reward that calls the own answer of some rows wrong, or has no opinion on it:
    their number and three of them. Looks at rows for some seconds."""
    lines = []
    for name in rewards:
        if name not in COMPARING or name == "cosine" or not is_built_in(name):
            continue
        reward = build_reward(name, args)
        deadline = time.monotonic() + _SECONDS
        seen = 0
        bad = []
        for row in rows:
            if time.monotonic() > deadline:
                break
            seen += 1
            if not _grades_itself(reward, row):
                bad.append(f"{row['prompt_id']} ({_short(row.get('solution'))})")
        if bad:
            more = "; ..." if len(bad) > _SHOWN else ""
            lines.append(
                f"{name} cannot read the solution of {len(bad)} of {seen} rows, whose own answer it calls wrong: "
                f"{'; '.join(bad[:_SHOWN])}{more}"
            )
    return lines


def _grades_itself(reward: Reward, row: Row) -> bool:
    gold = built_in_gold(row)
    if gold is None:
        return False
    try:
        return list(reward.call([gold], {"solution": [row["solution"]]})) == [1.0]
    except ValueError:  # a grader's way to say that it cannot read a gold
        return False


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _reached(row: Mapping[str, Any]) -> str | None:
    """Returns an expression that reaches the target from all numbers of a Countdown problem, found by trying all of
    them."""
    nums = row["nums"]
    target = row["target"]
    if (
        not isinstance(nums, list)
        or len(nums) > _MOST_NUMBERS
        or not all(isinstance(n, int) for n in (*nums, target))
    ):
        return None
    return _search([(Fraction(number), str(number)) for number in nums], Fraction(target))


def _search(terms: list[tuple[Fraction, str]], target: Fraction) -> str | None:
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for (i, (a, left)), (j, (b, right)) in permutations(enumerate(terms), 2):
        rest = [term for number, term in enumerate(terms) if number not in (i, j)]
        made = [(a + b, "+"), (a - b, "-"), (a * b, "*"), *([(a / b, "/")] if b else ())]
        for value, sign in made:
            expression = _search([*rest, (value, f"({left} {sign} {right})")], target)
            if expression is not None:
                return expression
    return None


def wrong_completions(
    rewards: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    golds: Sequence[str | None],
    args: Any,
) -> dict[str, list[str]]:
    """Returns the wrong completion of each row from each reward that has a method `wrong(row)`.

    Raises UsageError: it fails, or gives no text, or the right completion.
    """
    found = {}
    for name in rewards:
        if not callable(getattr(orms.get(name), "wrong", None)):
            continue
        function = build_reward(name, args).function.wrong  # type: ignore[attr-defined]
        what = f"reward {name}: its wrong(row)"
        found[name] = [_of_plugin(function, row, what) for row in rows]
        for row, wrong, gold in zip(rows, found[name], golds, strict=True):
            if wrong == gold:
                raise UsageError(f"{what} returned the right completion of row {row['prompt_id']}")
    return found


def _of_plugin(
    function: Callable[..., Any], row: Mapping[str, Any], what: str = "the plugin's gold(row)"
) -> str:
    try:
        text = function(dict(row))
    except Exception as error:
        raise UsageError(f"{what} fails: {describe(error)}") from error
    if not isinstance(text, str):
        raise UsageError(f"{what} returned {a_kind(text)}, not the text of a completion")
    return text


def _filled(template: str, row: Row) -> str:
    """Returns the template with `{column}` replaced; other braces stay, as in a judge's templates."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in row:
            known = ", ".join(sorted(set(row) - {"messages", "dataset", "prompt_id"}))
            raise UsageError(
                f"--gold names the column {found[1]}, and the data has {known or 'none'}"
            )
        return str(row[found[1]])

    from swift_r1.rewards.judge_config import PLACEHOLDER

    part = _PART.search(template)
    if part is not None and part[1] in row:
        raise UsageError(
            f"--gold {template!r}: only a whole column can be filled in, {{{part[1]}}}"
        )
    return PLACEHOLDER.sub(value, template)
