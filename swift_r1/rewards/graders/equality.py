r"""The rule `fast`: whether two tidied answers are equal. Strings first, then part by part, then values.

It runs in bounded time and evaluates no code. It is stricter than `math_verify` (the library): a whole number must be
written as one, a fraction in lowest terms, a list that is not written as a set in its order.

In values, letters are variables and get fixed rational values, several sets of them: two expressions that agree in all
of them are taken as equal (the identity test of Schwartz and Zippel, with fixed points). Nothing is expanded or
simplified, so the work is linear in the text.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from itertools import chain

from mpmath.libmp.libhyper import NoConvergence

from swift_r1.data.builtin import closing
from swift_r1.rewards.graders.answers import (
    MULTIPLIERS,
    QUALIFIER,
    without_unit,
)
from swift_r1.rewards.graders.bounded import Unreadable, Value, close
from swift_r1.rewards.graders.reader import POINTS, POINTS_ROUNDED, ExpressionReader, tokens

MAX_PARTS = 64  # of a list
MAX_MEMBERS = 24  # of a set

_LITERAL = re.compile(
    r"([-+]?)\s*([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+\.?[0-9]*|\.[0-9]+)"
    r"(?:(?:\s*\\times\s*10\s*\^\s*(?:\{\s*([-+]?[0-9]{1,3})\s*\}|([0-9])))|[eE]([-+]?[0-9]{1,3}))?"
)
_WHOLE = re.compile(r"[-+]?\s*[0-9,]+(\.0*)?")
_FRACTION = re.compile(
    r"(-?)\s*(?:\\frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))|([0-9]+)\s*/\s*([0-9]+))"
)
# x = ..., x_1 = ..., f(x) = ..., (x, y) = ..., x \in ..., \approx ...
_NAME = re.compile(
    r"(?:((?:[A-Za-z]|\\[a-z]+)(?:_(?:\{[^{}]+\}|\w))?(?:\s*\(\s*[A-Za-z]\s*\))?|\([A-Za-z](?:\s*,\s*[A-Za-z])+\))"
    r"\s*(?:=(?!=)|\\in(?![A-Za-z])|\\approx(?![A-Za-z]))|\\approx(?![A-Za-z]))\s*(.+)",
    re.DOTALL,
)
_JOIN = re.compile(r"\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*,?")
_WORDS = re.compile(r"\\text\s*\{([^{}]*)\}")
_LAST_WORD = re.compile(r"[^A-Za-z]*(?<!\\)([A-Za-z]+(?: [A-Za-z]+)*)(?:\^\{?[0-9]\}?)?\.?")
# 5 feet 10 inches; x = 5 feet x = 6
_COMPOUND = re.compile(
    r"=.*(?<![\\A-Za-z])[a-z]{3,}\b.*=|[0-9}]\s*(?:\\text\s*\{(?!\s*(?:and|or)\s*\})[^{}]*\}"
    r"|(?!(?:and|or|pi|ln|log|exp|sqrt|sin|cos|tan|cot|sec|csc)\b)[a-z]{2,}\s)\s*[0-9]"
)
# 21_{3}
_BASE = re.compile(r"[0-9A-F]_\{?([0-9]+)\}?$")
# > 5, which is no 5
_OPEN_SIDED = re.compile(r"\s*(?:[<>]|\\(?:le|ge|ne)(?![A-Za-z]))")
_ITEM_END = re.compile(r"(,|\b(?:or|and)\b)")
# (E) the longest one; not: E. Or D
_OPTION = re.compile(
    r"(?:(?i:option|choice|answer):? )?\(?([A-Z])"
    r"(?:\)?[.:]?|(?:\)?:|\)?\. |\) )(?!\W*(?i:or|and|in)\b|(?:.*\W)?(?i:or|and|not|nor)\b\W*[A-Z]\b|.*\([A-Z]\)).+)"
)
# -2 < x \le 7
_BOUNDS = re.compile(
    r"(?:(.+?)\s*(<|\\le(?![A-Za-z])))?\s*(?:[A-Za-z]|\\[a-z]+)\s*(?:(<|\\le(?![A-Za-z]))(.+))?"
)
# an angle is asked for in degrees or it is not
_DEGREES = re.compile(r"((?:[-+0-9.,/(){} ]|\\(?:frac|pm))+?) ?\^ ?\\circ")
_PAIRS = {"(": (")", "]"), "[": (")", "]"), "\\{": ("\\}",)}
_BRACKET = re.compile(r"\\[{}]|[()\[\]]")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\s*\{([pbvVB]?matrix|array)\}(?:\s*\{[clr| ]*\})?((?:(?!\\begin).)*)\\end\s*\{\1\}\s*[)\]]?",
    re.DOTALL,
)
_FREE_SPACE = re.compile(r" (?![0-9])|(?<![0-9]) ")
_TURNED = {
    "=": "=",
    "<": ">",
    ">": "<",
    "\\le": "\\ge",
    "\\ge": "\\le",
    "\\ne": "\\ne",
    "\\approx": "\\approx",
}
_RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|in|to|approx)(?![A-Za-z])")


def equal(given: str, right: str) -> bool:
    """Returns whether a tidied answer equals a tidied gold answer."""
    return (
        same_text(given, right)
        or same_words(given, right)
        or _equal_values(given, right, MAX_PARTS)
    )


def contradict(given: str, right: str) -> bool:
    r"""Returns whether two tidied answers differ by what the library drops: the unit, the name behind a number, a
    letter's case, the brackets of a pair, an interval or a set, words such as "at least"; or one has several
    quantities (5 feet 10 inches), or lists that it joins (1,2 or 2,2)."""
    if [word.lower() for word in QUALIFIER.findall(given)] != [
        word.lower() for word in QUALIFIER.findall(right)
    ]:
        return True
    if bool(_OPEN_SIDED.match(given)) != bool(_OPEN_SIDED.match(right)):
        return True
    if _COMPOUND.search(given) or _COMPOUND.search(right):
        return True
    if _multipliers(given) != _multipliers(right):
        return True
    items = [_ITEM_END.split(_WORDS.sub(r" \1 ", text)) for text in (given, right)]
    joined = any("," in own and not {"or", "and"}.isdisjoint(own) for own in items)
    if joined and len({sum(map(_is_item, own)) for own in items}) > 1:
        return True
    bases = [match[1] for text in (given, right) if (match := _BASE.search(text))]
    if len(set(bases)) > 1:
        return True
    unit = without_unit(given)[1]
    right_unit = without_unit(right)[1]
    if unit and right_unit:
        return unit != right_unit
    word = _last_word(given)
    right_word = _last_word(right)
    if word and right_word:
        return sorted(word) != sorted(right_word)  # 2xy is 2yx

    given, right = _without_name(given, right)
    brackets, inner = _inside(given)
    right_brackets, right_inner = _inside(right)
    if not brackets or not right_brackets or brackets == right_brackets:
        return False
    return len(_parts(inner)) > 1 or len(_parts(right_inner)) > 1


def _is_item(text: str) -> bool:
    return text.strip() not in ("", ",", "or", "and")


def _multipliers(text: str) -> list[str]:
    """Returns the words of a text such as million; a letter k is none."""
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", _WORDS.sub(r" \1", text))
    return [word for word in (word.lower().rstrip("s") for word in words) if word in MULTIPLIERS]


def _last_word(text: str) -> str:
    """Returns the word after a number, or that is all of a text; in lower case, except a letter."""
    match = _LAST_WORD.fullmatch(_WORDS.sub(r"\1", text))
    if match is None:
        return ""
    return match[1] if len(match[1]) == 1 else match[1].lower().rstrip("s")


def same_words(given: str, right: str) -> bool:
    r"""Returns whether an answer is the gold answer in words: \text{East} is east, and \text{(B)} is B, also with the
    text of option B."""
    option = _OPTION.fullmatch(_WORDS.sub(r"\1", right).strip())
    other = _OPTION.fullmatch(_WORDS.sub(r"\1", given).strip()) if option else None
    if option and other and option[1] == other[1]:
        return option[1] in (_bare_word(given), _bare_word(right))
    if "\\text" not in right and not re.fullmatch(r"\(?[A-Z]\)?|[A-Za-z ]{3,}", right):
        return False
    word = _bare_word(given)
    right_word = _bare_word(right)
    if not word.replace("(", "").replace(")", "").isalpha():
        return False
    if "\\text" in right or "\\text" in given:
        return word.casefold() == right_word.casefold()
    return word == right_word


def _bare_word(text: str) -> str:
    """Returns a text without LaTeX's commands for words, blanks, and brackets around a single letter."""
    word = _WORDS.sub(r"\1", text).replace(" ", "")
    return word[1:-1] if re.fullmatch(r"\([A-Za-z]\)", word) else word


def _without_name(given: str, right: str) -> tuple[str, str]:
    """Takes the name off an answer where the other has none: `x = 5` answers 5, for one letter, f(x), and (x, y)."""
    named_given = _NAME.fullmatch(given)
    named_right = _NAME.fullmatch(right)
    if named_given and not _RELATION.search(right) and not _RELATION.search(named_given[2]):
        return named_given[2], right
    if named_right and not _RELATION.search(given) and not _RELATION.search(named_right[2]):
        return given, named_right[2]
    return given, right


def _as_interval(text: str) -> str:
    r"""Returns the bounds of a letter as an interval, `-2 \le x < 7` as `[-2,7)`, and any other text as it is."""
    for turned in (text, _turned(text)):
        match = _BOUNDS.fullmatch(turned)
        if match and (match[2] or match[3]) and not _RELATION.search(f"{match[1]} {match[4]}"):
            lower = (
                "(-\\infty" if match[2] is None else f"{'(' if match[2] == '<' else '['}{match[1]}"
            )
            upper = (
                "\\infty)" if match[3] is None else f"{match[4]}{')' if match[3] == '<' else ']'}"
            )
            return f"{lower},{upper}"
    return text


def _turned(text: str) -> str:
    """Returns a chain of relations from right to left: 2 < x for x > 2."""
    sides = _RELATION.split(text)[::-1]
    signs = [_TURNED.get(sign, sign) for sign in _RELATION.findall(text)[::-1]]
    return sides[0] + "".join(f"{sign} {side}" for sign, side in zip(signs, sides[1:], strict=True))


def _without_degrees(text: str) -> str:
    """Returns the number of an angle in degrees, and any other text as it is."""
    match = _DEGREES.fullmatch(text) if text.endswith("\\circ") else None
    return text if match is None else match[1]


def _equal_values(given: str, right: str, budget: int) -> bool:
    """Returns whether two texts have equal values; `budget` is how many parts they may be cut into."""
    given, unit = without_unit(given)
    right, right_unit = without_unit(right)
    if unit and right_unit and unit != right_unit:
        return False
    given, right = map(_without_degrees, _without_name(given, right))
    if bool(_inside(given)[0]) != bool(_inside(right)[0]):
        given, right = map(_as_interval, (given, right))
    if same_text(given, right):
        return True
    if budget <= 0:
        return False

    number = _literal(right)
    if number is not None:  # one number, so the answer has to be one
        mine = _literal(given)
        if mine is not None or _WHOLE.fullmatch(right):
            return mine == number

    if "\\cup" in right or "\\cup" in given:
        return _same_set(given.split("\\cup"), right.split("\\cup"), budget)

    fraction = _fraction(given)
    right_fraction = _fraction(right)
    if fraction and right_fraction and Fraction(*fraction) == Fraction(*right_fraction):
        # in lowest terms
        return fraction == right_fraction or Fraction(*fraction).denominator == fraction[1]

    form, cells = _matrix(given)
    right_form, right_cells = _matrix(right)
    if form and right_form:
        return form == right_form and _same_list(cells, right_cells, budget)

    items, is_set = _members(given)
    right_items, right_is_set = _members(right)
    if is_set or right_is_set:
        return _same_set(items, right_items, budget)
    if len(items) > 1 or len(right_items) > 1:
        return _same_list(items, right_items, budget)

    brackets, inner = _inside(given)
    right_brackets, right_inner = _inside(right)
    parts = _parts(inner)
    right_parts = _parts(right_inner)
    several = len(parts) > 1 or len(right_parts) > 1
    if brackets and brackets == right_brackets:
        if several or "[" in brackets or "]" in brackets:
            return _same_list(parts, right_parts, budget)
    elif several:
        return False  # a pair is not an interval of another kind

    signs = _RELATION.findall(given)
    right_signs = _RELATION.findall(right)
    if not signs and not right_signs:
        return _same_value(given, right)
    sides = _RELATION.split(given)
    right_sides = _RELATION.split(right)
    if signs == right_signs and _same_list(sides, right_sides, budget):
        return True
    turned = [_TURNED.get(sign) for sign in reversed(signs)]  # 2 < x is x > 2
    return turned == right_signs and _same_list(sides[::-1], right_sides, budget)


def _members(text: str) -> tuple[list[str], bool]:
    r"""Returns what a list or a set in `\{ \}` holds, and whether it is a set, whose order does not count.

    An item with `\pm` is two, and makes it a set.
    """
    brackets, inner = _inside(text)
    is_set = brackets.startswith("\\")
    parts = _parts(inner if is_set else text)
    if "\\pm" not in text and "\\mp" not in text:
        return parts, is_set
    items = []
    for part in parts:
        upper = part.replace("\\pm", "+").replace("\\mp", "-")
        items.append(upper)
        if upper != part:
            items.append(part.replace("\\pm", "-").replace("\\mp", "+"))

    return items, True


def _matrix(text: str) -> tuple[tuple[str | int, ...], list[str]]:
    """Returns a matrix's form ("v" for a determinant, "" for round or square brackets; length of each row) and its
    cells; both are empty where a text is none."""
    match = _MATRIX.fullmatch(text) if "\\begin" in text else None
    if match is None:
        return (), []
    rows = [row.split("&") for row in match[2].strip().removesuffix("\\\\").split("\\\\")]
    kind = match[1][0] if match[1][0] in "vVB" else ""
    return (kind, *map(len, rows)), list(chain(*rows))


def _same_list(given: list[str], right: list[str], budget: int) -> bool:
    """Returns whether two lists are equal, part by part; `budget` is how many parts they may have."""
    if len(given) != len(right) or len(right) > budget:
        return False
    return all(
        _equal_values(a.strip(), b.strip(), budget // 2) for a, b in zip(given, right, strict=True)
    )


def _same_set(given: list[str], right: list[str], budget: int) -> bool:
    """Returns whether two sets are equal, in any order; members are limited, since every pair may be compared."""
    if len(given) != len(right) or len(right) > min(MAX_MEMBERS, budget):
        return False
    left = [text.strip() for text in right]
    for text in given:
        equal_ones = (item for item in left if _equal_values(text.strip(), item, budget // 2))
        match = next(equal_ones, None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_value(given: str, right: str) -> bool:
    """Returns whether two expressions are equal, exactly where both are rational, else to 200 digits, at every point
    that both have."""
    if _COMPOUND.search(given) or _COMPOUND.search(right):
        return False
    try:
        mine = values(given)
        wanted = values(right)
    except Unreadable:
        return False

    if len(mine) == 1:  # without variables: the same at every point
        mine *= len(wanted)
    if len(wanted) == 1:
        wanted *= len(mine)
    return all(map(close, mine, wanted))


@lru_cache(maxsize=4096)
def values(text: str) -> tuple[Value, ...]:
    """Returns the expression's value at each point, one without variables; raises Unreadable, and nothing else, on any
    text."""
    read = tokens(text)
    # How many points are wanted is known when the first is read.
    at_points: list[Value] = []
    wanted = 1
    while len(at_points) < wanted:
        reader = ExpressionReader(read, len(at_points) + 1)
        try:
            at_points.append(reader.whole())
        except (ZeroDivisionError, OverflowError, NoConvergence, TypeError) as error:
            raise Unreadable(str(error)) from error
        if reader.variables:
            wanted = POINTS_ROUNDED if reader.rounded else POINTS

    return tuple(at_points)


def _literal(text: str) -> Fraction | None:
    """Returns a number written as one: sign, digits with or without thousands commas, decimals, power of ten."""
    match = _LITERAL.fullmatch(text)
    if match is None or len(text) > 200:
        return None
    value = Fraction(match[2].replace(",", ""))
    power = int(match[3] or match[4] or match[5] or 0)
    return (-value if match[1] == "-" else value) * Fraction(10) ** power


def _fraction(text: str) -> tuple[int, int] | None:
    """Returns numerator and denominator of a fraction of whole numbers, as they are written; the latter is above 0."""
    match = _FRACTION.fullmatch(text)
    if match is None or len(text) > 200:
        return None
    numerator = int(match[2] or match[3] or match[6])
    denominator = int(match[4] or match[5] or match[7])
    if denominator == 0:
        return None
    if bool(match[1]) != (denominator < 0):
        numerator = -numerator
    return numerator, abs(denominator)


def _inside(text: str) -> tuple[str, str]:
    r"""Returns the brackets around a whole text ("()", "[)", "\{\}"), and what they hold; "" and the text without."""
    width = 2 if text.startswith("\\{") else 1
    if len(text) < 2 * width or text[-width:] not in _PAIRS.get(text[:width], ()):
        return "", text
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket[0] in _PAIRS else -1
        if depth == 0 and bracket.end() < len(text):
            return "", text  # (a)(b)
    return text[:width] + text[-width:], text[width:-width]


def _parts(text: str) -> list[str]:
    """Returns the text cut at commas, semicolons, "and" and "or" outside brackets and braces."""
    text = _JOIN.sub(",", text)
    if "," not in text and ";" not in text:
        return [text.strip()]

    parts = []
    depth = 0
    start = 0
    index = 0
    while index < len(text):
        character = text[index]
        if character == "\\":
            depth += {"{": 1, "}": -1}.get(text[index + 1 : index + 2], 0)
            index += 1
        elif character == "{":
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


def same_text(given: str, right: str) -> bool:
    """Returns whether two texts are equal except for spaces, and not empty; a space between two digits counts."""
    if given == right:
        return bool(given)
    return bool(given) and _FREE_SPACE.sub("", given) == _FREE_SPACE.sub("", right)
