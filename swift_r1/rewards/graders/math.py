r"""Mathematical answers: is what a completion puts into its box, or its answer tag, equal to the gold answer?

`equality.py` has the rule `fast`, `library.py` has `math_verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from swift_r1.data.builtin import last_boxed
from swift_r1.rewards.graders.answers import OPEN, Grade, answered, tidied, written_answer
from swift_r1.rewards.graders.equality import contradict, equal, same_text, same_words
from swift_r1.rewards.graders.library import library_equal

MAX_ANSWER = 2_000  # characters; more is wrong

Gold = str | int | float | Sequence[str | int | float]


def grade_math(
    response: str,
    gold: Gold,
    verifier: Literal["fast", "math_verify"] = "fast",
    answer: Literal["boxed", "tag", "tag_strict"] = "boxed",
) -> Grade:
    r"""Grades one completion: 1 for an answer equal to a gold answer, else 0.

    Args:
        response: the model's text.
        gold: the right answer, boxed or not; or a list of accepted ones.
        verifier: `fast` or `math_verify`. What reads the same after tidying is equal in both.
        answer: where the answer stands behind the thought. `boxed`: in the last `\boxed{}`, which must be closed.
            `tag`: in the last `<answer>` block, which must be closed, and in the last box in it where there is one.
            `tag_strict`: the same, but the first block must follow the thought's end after exactly one space
            (`</think> <answer>`), as in Dr. GRPO (arXiv 2503.20783).

    Raises ValueError: an unknown verifier or template, or no gold answer; never because of the completion.
    """
    if verifier not in ("fast", "math_verify"):
        raise ValueError(f"unknown verifier {verifier!r}: fast or math_verify")
    golds = gold if isinstance(gold, list | tuple) else [gold]
    if not golds:
        raise ValueError("no gold answer")
    accepted = [(text, tidied(text)) for text in map(_gold_text, golds)]
    if not all(right for _, right in accepted):
        raise ValueError("a gold answer is empty")
    written = _answer(response, answer)
    if written is None:
        return Grade(0.0, False)
    if len(written) > MAX_ANSWER:
        return Grade(0.0, True)

    given = tidied(written)
    for _, right in accepted:
        if same_text(given, right) or same_words(given, right):
            return Grade(1.0, True)
    for text, right in accepted:
        if verifier == "fast":
            is_right = equal(given, right)
        else:
            is_right = not contradict(given, right) and library_equal(written, text)
        if is_right:
            return Grade(1.0, True)

    return Grade(0.0, True)


def math_answer(
    response: str, answer: Literal["boxed", "tag", "tag_strict"] = "boxed"
) -> str | None:
    """Returns the tidied answer of a completion, found as `grade_math` finds it; None without one, or a too long
    one."""
    written = _answer(response, answer)
    return None if written is None or len(written) > MAX_ANSWER else tidied(written) or None


def same_answer(first: str, second: str) -> bool:
    """Returns whether two tidied answers are the same by the rule `fast`, whichever of them is taken as the right
    one."""
    return same_text(first, second) or equal(first, second) or equal(second, first)


def _answer(response: str, template: str) -> str | None:
    """Returns the answer of a completion as it is written; None without one. Raises ValueError: an unknown template."""
    if template not in ("boxed", "tag", "tag_strict"):
        raise ValueError(f"unknown answer template {template!r}: boxed, tag or tag_strict")
    text = answered(response)
    if template == "boxed":
        return last_boxed(text)
    is_strict = text.startswith(f" {OPEN}") and len(text) < len(response)
    if OPEN not in text or (template == "tag_strict" and not is_strict):
        return None
    return written_answer(text) or None


def _gold_text(item: Any) -> str:
    """Returns a gold answer without its box. Raises ValueError: it is no text or number."""
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        raise ValueError(f"a gold answer is text or a number, not {item!r}")
    if isinstance(item, float) and item.is_integer():
        item = int(item)
    inner = last_boxed(str(item))
    return str(item) if inner is None else inner
