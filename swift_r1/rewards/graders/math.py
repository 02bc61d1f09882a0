r"""Mathematical answers: is what a completion puts into its box, or its answer tag, equal to the gold answer?

`fast` compares strings after tidying, then values, in bounded time and without evaluating code. It is stricter than
`math_verify` (the library): a whole number must be written as one, a fraction in lowest terms, a list in its order.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from swift_r1.rewards.graders.grade import Grade
from swift_r1.rewards.graders.latex import closing, last_boxed, tidied, unboxed, without_unit
from swift_r1.rewards.graders.tags import CLOSE, OPEN, last_answer
from swift_r1.rewards.graders.value import Unreadable, Value, same, values

MAX_ANSWER = 2_000  # characters; more is wrong
MAX_PARTS = 64  # of a list
LIBRARY_SECONDS = 5  # of one math_verify call, where it runs in the main thread
STRICT = "</think> <answer>"

Gold = str | int | float | Sequence[str | int | float]

_LITERAL = re.compile(
    r"([-+]?)\s*([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+\.?[0-9]*|\.[0-9]+)"
    r"(?:(?:\s*\\times\s*10\s*\^\s*(?:\{\s*([-+]?[0-9]{1,3})\s*\}|([0-9])))|[eE]([-+]?[0-9]{1,3}))?"
)
_FRACTION = re.compile(
    r"(-?)\s*(?:\\frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))|([0-9]+)\s*/\s*([0-9]+))"
)
_NAME = re.compile(r"([A-Za-z](?:_(?:\{\w+\}|\w))?(?:\s*\(\s*[A-Za-z]\s*\))?)\s*=(?!=)\s*(.+)", re.DOTALL)
_JOIN = re.compile(r"\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*,?")
_WORDS = re.compile(r"\\text\s*\{([^{}]*)\}")
_PAIRS = {"(": ")]", "[": ")]"}
_RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|in|to|approx)(?![A-Za-z])")
# What makes the library's exact arithmetic explode: towers of powers, huge exponents and factorials.
EXPLOSIVE = re.compile(
    r"(?:\^|\*\*)[^+]{0,40}?(?:\^|\*\*)|(?:\^|\*\*)\s*[{(]*\s*-?[0-9.]*[0-9]{4}|[0-9]{3}\s*\)?\s*!|!\s*!"
)


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

    Raises:
        ValueError: an unknown verifier or template, or no gold answer; never because of the completion.
    """
    if verifier not in ("fast", "math_verify"):
        raise ValueError(f"unknown verifier {verifier!r}: fast or math_verify")
    accepted = _gold_texts(gold)
    found = _answer(response, answer)
    if found is None:
        return Grade(0.0, False)
    if len(found) > MAX_ANSWER:
        return Grade(0.0, True)
    given = tidied(found)
    if any(_same_text(given, right) for right in accepted):
        return Grade(1.0, True)
    if verifier == "math_verify":
        return Grade(float(any(_library_equal(found, given, right) for right in accepted)), True)
    return Grade(float(any(_equal(given, right) for right in accepted)), True)


def _answer(response: str, template: str) -> str | None:
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


def _gold_texts(gold: Any) -> tuple[str, ...]:
    items = gold if isinstance(gold, list | tuple) else [gold]
    if not items:
        raise ValueError("no gold answer")
    return tuple(_gold_text(item) for item in items)


def _gold_text(item: Any) -> str:
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        raise ValueError(f"a gold answer is text or a number, not {item!r}")
    if isinstance(item, float) and item.is_integer():
        item = int(item)
    text = tidied(unboxed(str(item)))
    if not text:
        raise ValueError("a gold answer is empty")
    return text


def _same_text(given: str, right: str) -> bool:
    return bool(given) and given.replace(" ", "") == right.replace(" ", "")


def _equal(given: str, right: str) -> bool:
    """The fast rule, on tidied texts."""
    given, given_unit = without_unit(given)
    right, right_unit = without_unit(right)
    if given_unit and right_unit and given_unit != right_unit:
        return False
    if _same_text(given, right) or _same_words(given, right):
        return True
    given, right = _without_name(given, right)
    return _equal_values(given, right, MAX_PARTS)


def _same_words(given: str, right: str) -> bool:
    r"""Answers in words: \text{East} is east, and \text{(B)} is B."""
    if "\\text" not in right and not re.fullmatch(r"\(?[A-Z]\)?|[A-Za-z ]{3,}", right):
        return False
    plain = [_WORDS.sub(r"\1", text).replace(" ", "") for text in (given, right)]
    plain = [text[1:-1] if re.fullmatch(r"\([A-Za-z]\)", text) else text for text in plain]
    if not plain[0] or not plain[0].replace("(", "").replace(")", "").isalpha():
        return False
    if "\\text" in right or "\\text" in given:
        return plain[0].casefold() == plain[1].casefold()
    return plain[0] == plain[1]


def _without_name(given: str, right: str) -> tuple[str, str]:
    """`x = 5` answers 5, for one letter (and f(x)); where both are named, the names count."""
    named_given, named_right = _NAME.fullmatch(given), _NAME.fullmatch(right)
    if named_given and not _RELATION.search(right) and not _RELATION.search(named_given[2]):
        return named_given[2], right
    if named_right and not _RELATION.search(given) and not _RELATION.search(named_right[2]):
        return given, named_right[2]
    return given, right


def _equal_values(given: str, right: str, budget: int) -> bool:
    if _same_text(given, right):
        return True
    if budget <= 0:
        return False
    literal = _literal(right)
    if literal is not None:  # one number, so the answer has to be one
        mine = _literal(given)
        if mine is not None or _is_whole(right):
            return mine == literal
    if "\\cup" in right or "\\cup" in given:
        return _same_set(given.split("\\cup"), right.split("\\cup"), budget)
    fractions = _fraction(given), _fraction(right)
    if fractions[0] and fractions[1] and _written(*fractions[0]) == _written(*fractions[1]):
        return fractions[0] == fractions[1] or _in_lowest_terms(*fractions[0])
    inner = _inside(given), _inside(right)
    if inner[0] and inner[1] and inner[0][0] == inner[1][0]:
        kind, given_body = inner[0]
        parts = _parts(given_body), _parts(inner[1][1])
        if kind == "{}":
            return _same_set(*parts, budget)
        if len(parts[0]) > 1 or len(parts[1]) > 1 or "[" in kind or "]" in kind:
            return _same_list(*parts, budget)
    elif (inner[0] and len(_parts(inner[0][1])) > 1) or (inner[1] and len(_parts(inner[1][1])) > 1):
        return False  # a pair is not an interval of another kind
    parts = _parts(given), _parts(right)
    if len(parts[0]) > 1 or len(parts[1]) > 1:
        return _same_list(*parts, budget)
    relations = _RELATION.findall(given), _RELATION.findall(right)
    if relations[0] or relations[1]:
        if relations[0] != relations[1]:
            return False
        return _same_list(_RELATION.split(given), _RELATION.split(right), budget)
    return _same_value(given, right)


def _same_list(given: list[str], right: list[str], budget: int) -> bool:
    if len(given) != len(right) or len(right) > budget:
        return False
    share = budget // 2
    return all(_equal_values(a.strip(), b.strip(), share) for a, b in zip(given, right, strict=True))


def _same_set(given: list[str], right: list[str], budget: int) -> bool:
    """Equal whatever the order; at most 8 members, for every pair may be looked at."""
    if len(given) != len(right) or len(right) > min(8, budget):
        return False
    left = [text.strip() for text in right]
    for text in given:
        match = next((item for item in left if _equal_values(text.strip(), item, budget // 2)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_value(given: str, right: str) -> bool:
    try:
        for plus, minus in (("+", "-"), ("-", "+")):
            first, second = (text.replace("\\pm", plus).replace("\\mp", minus) for text in (given, right))
            if not same(_values(first), _values(second)):
                return False
            if first == given and second == right:
                break
    except Unreadable:
        return False
    return ("\\pm" in given) == ("\\pm" in right)


@lru_cache(maxsize=4096)
def _values(text: str) -> tuple[Value, ...]:
    return values(text)


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"[-+]?\s*[0-9,]+(\.0*)?", text) is not None


def _literal(text: str) -> Fraction | None:
    """A number written as one: sign, digits with or without thousands commas, decimals, power of ten."""
    found = _LITERAL.fullmatch(text)
    if found is None or len(text) > 200:
        return None
    value = Fraction(found[2].replace(",", ""))
    power = int(found[3] or found[4] or found[5] or 0)
    return (-value if found[1] == "-" else value) * Fraction(10) ** power


def _fraction(text: str) -> tuple[int, int] | None:
    """Numerator and denominator of a fraction of whole numbers, as they are written."""
    found = _FRACTION.fullmatch(text)
    if found is None or len(text) > 200:
        return None
    numerator, denominator = (int(a or b or c) for a, b, c in (found.group(2, 3, 6), found.group(4, 5, 7)))
    numerator = -numerator if found[1] else numerator
    if denominator == 0:
        return None
    return (numerator, denominator) if denominator > 0 else (-numerator, -denominator)


def _written(numerator: int, denominator: int) -> Fraction:
    return Fraction(numerator, denominator)


def _in_lowest_terms(numerator: int, denominator: int) -> bool:
    return Fraction(numerator, denominator).denominator == denominator


def _inside(text: str) -> tuple[str, str] | None:
    """The brackets around a whole text, and what they hold: "()", "[)", "{}", ..."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "{}", text[2:-2]
    if len(text) < 2 or text[0] not in _PAIRS or text[-1] not in _PAIRS[text[0]]:
        return None
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if depth == 0 and index < len(text) - 1:
            return None  # (a)(b)
    return text[0] + text[-1], text[1:-1]


def _parts(text: str) -> list[str]:
    """The text cut at commas, semicolons, "and" and "or" outside brackets and braces."""
    text = _JOIN.sub(",", text)
    parts, depth, start, index = [], 0, 0, 0
    while index < len(text):
        character = text[index]
        if character == "{":
            index = closing(text, index) or len(text)
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character in ",;" and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
        index += 1
    parts.append(text[start:].strip())
    return [part for part in parts if part] or [""]


def _library_equal(found: str, given: str, right: str) -> bool:
    """math_verify's verdict. It computes exactly and without bounds, so texts that explode are refused first."""
    from math_verify import parse, verify

    if len(given) > 400 or len(right) > 400 or EXPLOSIVE.search(given) or not given:
        return False
    # Its time-outs are alarm signals, which only the main thread can have.
    limit = LIBRARY_SECONDS if threading.current_thread() is threading.main_thread() else None
    parsed = parse(f"\\boxed{{{found}}}", parsing_timeout=limit, raise_on_error=False)
    expected = _library_gold(right)
    if not parsed or not expected:
        return False
    return bool(verify(expected, parsed, timeout_seconds=limit, raise_on_error=False))


def _library_gold(right: str) -> Any:
    from math_verify import parse

    limit = LIBRARY_SECONDS if threading.current_thread() is threading.main_thread() else None
    return parse(f"\\boxed{{{right}}}", parsing_timeout=limit, raise_on_error=False)
