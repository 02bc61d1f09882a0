r"""Mathematical answers: is what a completion puts into its box, or its answer tag, equal to the gold answer?

`equality.py` has the rule `fast`, `library.py` has `math_verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from swift_r1.data.builtin import last_boxed
from swift_r1.rewards.graders.answers import CLOSE, OPEN, Grade, last_answer, tidied
from swift_r1.rewards.graders.equality import contradict, equal, same_text, same_words
from swift_r1.rewards.graders.library import library_equal

MAX_ANSWER = 2_000  # characters; more is wrong
STRICT = "</think> <answer>"

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
        answer: `boxed`: the last `\boxed{}`, which must be closed. `tag`: the last `<answer>` block, and the box in
            it where there is one. `tag_strict`: the same, but the text must hold `</think> <answer>` with exactly
            one space and a closing tag after it, as in Dr. GRPO (arXiv 2503.20783).

    Raises ValueError: an unknown verifier or template, or no gold answer; never because of the completion.
    """
    if verifier not in ("fast", "math_verify"):
        raise ValueError(f"unknown verifier {verifier!r}: fast or math_verify")
    golds = gold if isinstance(gold, list | tuple) else [gold]
    if not golds:
        raise ValueError("no gold answer")
    accepted = [_gold_text(item) for item in golds]
    written = _answer(response, answer)
    if written is None:
        return Grade(0.0, False)
    if len(written) > MAX_ANSWER:
        return Grade(0.0, True)

    given = tidied(written)
    for right in accepted:
        if same_text(given, right) or same_words(given, right):
            return Grade(1.0, True)
    for right in accepted:
        if verifier == "fast":
            is_right = equal(given, right)
        else:
            is_right = not contradict(given, right) and library_equal(written, given, right)
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
    if template == "boxed":
        return last_boxed(response)
    if template not in ("tag", "tag_strict"):
        raise ValueError(f"unknown answer template {template!r}: boxed, tag or tag_strict")
    if template == "tag_strict":
        start = response.find(STRICT)
        if start < 0 or CLOSE not in response[start:]:
            return None
        start = response.rfind(OPEN, 0, response.rfind(CLOSE))
        content: str | None = response[start + len(OPEN) : response.find(CLOSE, start)]
    else:
        content = last_answer(response)

    if content is None or "\\boxed" not in content:
        return content
    return last_boxed(content)


def _gold_text(item: Any) -> str:
    """Returns a gold answer tidied and without its box. Raises ValueError: it is no text or number, or empty."""
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        raise ValueError(f"a gold answer is text or a number, not {item!r}")
    if isinstance(item, float) and item.is_integer():
        item = int(item)
    inner = last_boxed(str(item))
    text = tidied(str(item) if inner is None else inner)
    if not text:
        raise ValueError("a gold answer is empty")
    return text
