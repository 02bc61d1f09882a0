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

from mpmath.libmp.libhyper import NoConvergence

from swift_r1.data.builtin import closing
from swift_r1.rewards.graders.answers import without_unit
from swift_r1.rewards.graders.bounded import Unreadable, Value, close
from swift_r1.rewards.graders.reader import ExpressionReader, tokens

MAX_PARTS = 64  # of a list
MAX_MEMBERS = 24  # of a set
POINTS = 3  # sets of values of the variables; the first has positive values only, the others both signs
POINTS_ROUNDED = 32  # where something is rounded; the later ones are large

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
_MULTIPLIERS = frozenset(("dozen", "hundred", "thousand", "million", "billion", "trillion"))
_DEGREES = re.compile(
    r"((?:[-+0-9.,/(){} ]|\\(?:frac|pm))+?) ?\^ ?\\circ"
)  # an angle is asked for in degrees or it is not
_PAIRS = {"(": (")", "]"), "[": (")", "]"), "\\{": ("\\}",)}
_BRACKET = re.compile(r"\\[{}]|[()\[\]]")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\s*\{([pbvVB]?matrix|array)\}(?:\s*\{[clr| ]*\})?((?:(?!\\begin).)*)\\end\s*\{\1\}\s*[)\]]?",
    re.DOTALL,
)
_FREE_SPACE = re.compile(r" (?![0-9])|(?<![0-9]) ")
_TURNED = {"=": "=", "<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "\\approx": "\\approx"}
_RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|in|to|approx)(?![A-Za-z])")


def equal(given: str, right: str) -> bool:
    """Returns whether a tidied answer equals a tidied gold answer."""
    return same_text(given, right) or same_words(given, right) or _equal_values(given, right, MAX_PARTS)


def contradict(given: str, right: str) -> bool:
    r"""Returns whether two tidied answers differ by what the library drops: the unit, the name behind a number, a
    letter's case, the brackets of a pair, an interval or a set."""
    units = without_unit(given)[1], without_unit(right)[1]
    words = _last_word(given), _last_word(right)
    if all(units) or all(words):
        return units[0] != units[1] if all(units) else sorted(words[0]) != sorted(words[1])  # 2xy is 2yx
    if not _MULTIPLIERS.isdisjoint(words):
        return True
    inner = [_inside(text) for text in _without_name(given, right)]
    if inner[0] is None or inner[1] is None or inner[0][0] == inner[1][0]:
        return False
    return any(len(_parts(part[1])) > 1 for part in inner if part is not None)


def _last_word(text: str) -> str:
    """Returns the word after a number, or that is all of a text; in lower case, except a letter."""
    found = _LAST_WORD.fullmatch(_WORDS.sub(r"\1", text))
    if found is None:
        return ""
    return found[1] if len(found[1]) == 1 else found[1].lower().rstrip("s")


def same_words(given: str, right: str) -> bool:
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
    """`x = 5` answers 5, for one letter (and f(x), and (x, y)); where both are named, the names count."""
    named_given = _NAME.fullmatch(given)
    named_right = _NAME.fullmatch(right)
    if named_given and not _RELATION.search(right) and not _RELATION.search(named_given[2]):
        return named_given[2], right
    if named_right and not _RELATION.search(given) and not _RELATION.search(named_right[2]):
        return given, named_right[2]
    return given, right


def _without_degrees(text: str) -> str:
    found = _DEGREES.fullmatch(text) if text.endswith("\\circ") else None
    return text if found is None else found[1]


def _equal_values(given: str, right: str, budget: int) -> bool:
    (given, given_unit), (right, right_unit) = without_unit(given), without_unit(right)
    if given_unit and right_unit and given_unit != right_unit:
        return False
    given, right = map(_without_degrees, _without_name(given, right))
    if same_text(given, right):
        return True
    if budget <= 0:
        return False
    literal = _literal(right)
    if literal is not None:  # one number, so the answer has to be one
        mine = _literal(given)
        if mine is not None or _WHOLE.fullmatch(right):
            return mine == literal
    if "\\cup" in right or "\\cup" in given:
        return _same_set(given.split("\\cup"), right.split("\\cup"), budget)
    mine_over = _fraction(given)
    right_over = _fraction(right)
    if mine_over and right_over and Fraction(*mine_over) == Fraction(*right_over):
        return mine_over == right_over or Fraction(*mine_over).denominator == mine_over[1]  # in lowest terms
    matrices = _matrix(given), _matrix(right)
    if matrices[0] and matrices[1]:
        (form, cells), (right_form, right_cells) = matrices[0], matrices[1]
        return form == right_form and _same_list(cells, right_cells, budget)
    (items, is_set), (right_items, right_is_set) = _members(given), _members(right)
    if is_set or right_is_set:
        return _same_set(items, right_items, budget)
    if len(items) > 1 or len(right_items) > 1:
        return _same_list(items, right_items, budget)
    inner = _inside(given), _inside(right)
    if inner[0] and inner[1] and inner[0][0] == inner[1][0]:
        parts = _parts(inner[0][1]), _parts(inner[1][1])
        if len(parts[0]) > 1 or len(parts[1]) > 1 or "[" in inner[0][0] or "]" in inner[0][0]:
            return _same_list(*parts, budget)
    elif any(part and len(_parts(part[1])) > 1 for part in inner):
        return False  # a pair is not an interval of another kind
    relations = _RELATION.findall(given), _RELATION.findall(right)
    if relations[0] or relations[1]:
        sides = _RELATION.split(given), _RELATION.split(right)
        turned = [_TURNED.get(sign) for sign in reversed(relations[0])]  # 2 < x is x > 2
        return (relations[0] == relations[1] and _same_list(*sides, budget)) or (
            turned == relations[1] and _same_list(sides[0][::-1], sides[1], budget)
        )
    return _same_value(given, right)


def _members(text: str) -> tuple[list[str], bool]:
    r"""Returns what a list or a set in `\{ \}` holds, and whether its order does not count; an item with `\pm` is
    two."""
    inner = _inside(text) if text.startswith("\\{") else None
    parts = _parts(text if inner is None else inner[1])
    if "\\pm" not in text and "\\mp" not in text:
        return parts, inner is not None
    items = []
    for part in parts:
        upper = part.replace("\\pm", "+").replace("\\mp", "-")
        items += [upper] if upper == part else [upper, part.replace("\\pm", "-").replace("\\mp", "+")]
    return items, True


def _matrix(text: str) -> tuple[tuple[str | int, ...], list[str]] | None:
    """Its form ("v" for a determinant, "" for round or square brackets; length of each row) and its cells."""
    found = _MATRIX.fullmatch(text) if "\\begin" in text else None
    if found is None:
        return None
    rows = [row.split("&") for row in found[2].strip().removesuffix("\\\\").split("\\\\")]
    kind = found[1][0] if found[1][0] in "vVB" else ""
    return (kind, *map(len, rows)), [cell for row in rows for cell in row]


def _same_list(given: list[str], right: list[str], budget: int) -> bool:
    if len(given) != len(right) or len(right) > budget:
        return False
    return all(_equal_values(a.strip(), b.strip(), budget // 2) for a, b in zip(given, right, strict=True))


def _same_set(given: list[str], right: list[str], budget: int) -> bool:
    """Equal in any order; members are limited, since every pair may be compared."""
    if len(given) != len(right) or len(right) > min(MAX_MEMBERS, budget):
        return False
    left = [text.strip() for text in right]
    for text in given:
        match = next((item for item in left if _equal_values(text.strip(), item, budget // 2)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_value(given: str, right: str) -> bool:
    """Exactly where both are rational, else to 48 digits, at every point that both have."""
    try:
        found = values(given), values(right)
    except Unreadable:
        return False
    longest = max(map(len, found))
    return all(map(close, *(one * longest if len(one) == 1 else one for one in found)))


@lru_cache(maxsize=4096)
def values(text: str) -> tuple[Value, ...]:
    """Returns the expression's value at each point, one without variables; raises Unreadable, and nothing else, on any
    text."""
    read = tokens(text)
    found: list[Value] = []
    wanted = 1
    while len(found) < wanted:
        reader = ExpressionReader(read, len(found) + 1)
        try:
            found.append(reader.whole())
        except (ZeroDivisionError, OverflowError, NoConvergence, TypeError) as error:
            raise Unreadable(str(error)) from error
        if reader.variables:
            wanted = POINTS_ROUNDED if reader.rounded else POINTS
    return tuple(found)


def _literal(text: str) -> Fraction | None:
    """Returns a number written as one: sign, digits with or without thousands commas, decimals, power of ten."""
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


def _inside(text: str) -> tuple[str, str] | None:
    r"""Returns the brackets around a whole text, and what they hold: "()", "[)", "\{\}"."""
    width = 2 if text.startswith("\\{") else 1
    if len(text) < 2 * width or text[-width:] not in _PAIRS.get(text[:width], ()):
        return None
    depth = 0
    for found in _BRACKET.finditer(text):
        depth += 1 if found[0] in _PAIRS else -1
        if depth == 0 and found.end() < len(text):
            return None  # (a)(b)
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
    """Equal except for spaces, and not empty; a space between two digits counts."""
    if given == right:
        return bool(given)
    return bool(given) and _FREE_SPACE.sub("", given) == _FREE_SPACE.sub("", right)
