r"""Answers made by rule from gold answers: in the ways in which models write them, and near ones that are wrong.

A rule takes a gold answer and yields rewritings of it, none where it does not apply. For `grading_accuracy.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

Rule = Callable[[str], Iterator[str]]
KEEPS: dict[str, Rule] = {}  # the value
BY_RULE: dict[str, Rule] = {}  # keep the value, and `fast` refuses them by its rules
CHANGES: dict[str, Rule] = {}

NUMBER = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
FRACTION = re.compile(r"(-?)\\d?frac\s*\{?(\d+)\}?\s*\{?(\d+)\}?")
SIMPLE = re.compile(r"(?:[0-9a-zA-Z+\-(){}^/. ]|\\(?:frac|sqrt|pi|cdot|left|right)(?![a-zA-Z]))+")
WORD = re.compile(r"\\text\{\(?([A-Za-z]+)\)?\}")
TUPLE = re.compile(r"(?:\\left)?\s*\((.*?)(?:\\right)?\)")


def rule(table: dict[str, Rule], kind: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        table[kind] = function
        return function

    return register


def split(text: str) -> list[str]:
    """At the commas outside brackets and braces; numbers such as 58,500 are not lists."""
    text = text.replace(",\\!", "")
    if re.fullmatch(r"\\?\$?\d{1,3}(,\d{3})+", text):
        return [text]
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def is_value(text: str) -> bool:
    """One number or expression: no list, pair, set, matrix, relation, word or choice of signs."""
    odd = (
        "\\pm",
        "begin",
        "\\{",
        "=",
        "<",
        ">",
        "\\g",
        "\\in",
        "text",
        "mbox",
        "\\cup",
        "_",
        "[",
        "prime",
    )
    return (
        len(split(text)) == 1
        and not TUPLE.fullmatch(text)
        and not any(word in text for word in odd)
    )


@rule(KEEPS, "as it is")
def same(gold: str) -> Iterator[str]:
    yield gold


@rule(KEEPS, "spacing")
def spacing(gold: str) -> Iterator[str]:
    if "text" in gold or "mbox" in gold:
        return
    tight = re.sub(r"(?<![a-zA-Z\\]) +| +(?![a-zA-Z ])", "", gold)
    wide = re.sub(r"(?<!\\)([-+=])(?![^{]*pt\])", r" \1 ", gold)
    yield from {tight, wide} - {gold}
    if len(split(gold)) > 1:
        yield ",\\ ".join(split(gold))
        yield ", \\quad ".join(split(gold))
    if "\\\\" in gold:
        yield re.sub(r"\s*\\\\\s*", r" \\\\ ", gold)
        yield re.sub(r"\s*\\\\\s*", r"\\\\", gold)
        yield re.sub(r"\s*\\\\\s*", "\\\\\\\\[4pt]\n", gold)


@rule(KEEPS, "\\dfrac, braces")
def fractions_in_display(gold: str) -> Iterator[str]:
    if "\\frac" in gold:
        yield gold.replace("\\frac", "\\dfrac")
        yield gold.replace("\\frac", "\\tfrac")
    yield from {re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", gold)} - {gold}
    yield from {re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2", gold)} - {gold}
    yield from {re.sub(r"\^\{(\w)\}", r"^\1", gold), re.sub(r"\^(\w)", r"^{\1}", gold)} - {gold}
    yield from {re.sub(r"\\sqrt\{(\d)\}", r"\\sqrt\1", gold)} - {gold}


@rule(KEEPS, "brackets")
def sizes(gold: str) -> Iterator[str]:
    if "(" in gold and "text" not in gold:
        plain = gold.replace("\\left", "").replace("\\right", "")
        sized = re.sub(r"(?<![a-z])([(\[])", r"\\left\1", plain)
        yield re.sub(r"([)\]])", r"\\right\1", sized) if "[4pt]" not in gold else gold
        yield re.sub(r"([)\]])", r"\\bigr\1", re.sub(r"([(\[])", r"\\bigl\1", plain))


@rule(KEEPS, "style")
def style(gold: str) -> Iterator[str]:
    yield f"${gold}$"
    yield f"\\displaystyle {gold}"
    yield gold + "."
    if "text" not in gold and "mbox" not in gold:
        yield f"\\mathbf{{{gold}}}"
        yield f"{{{gold}}}"
    if NUMBER.fullmatch(gold):
        yield f"\\text{{{gold}}}"
        yield f"\\boxed{{{gold}}}"


@rule(KEEPS, "words")
def words(gold: str) -> Iterator[str]:
    if found := WORD.fullmatch(gold):
        word = found[1]
        yield from (
            word,
            f"\\mathrm{{{word}}}",
            f"\\textbf{{{word}}}",
            f"\\text{{ {word} }}",
            f"\\text{{{word}.}}",
        )
        if len(word) == 1:
            yield from (
                f"({word})",
                f"\\textbf{{({word})}}",
                f"\\text{{({word})}}",
                f"\\mathrm{{({word})}}",
            )


@rule(KEEPS, "units")
def units(gold: str) -> Iterator[str]:
    if NUMBER.fullmatch(gold) or FRACTION.fullmatch(gold):
        for unit in (
            "\\text{ cm}",
            "\\,\\text{cm}^2",
            " \\text{ square units}",
            "\\text{ units}",
            "\\ \\mathrm{km/h}",
        ):
            yield gold + unit
        yield gold + " \\text{ ways}"
        if not gold.startswith("\\"):
            yield gold + " meters"
            yield "\\$" + gold
    if found := re.fullmatch(r"(.*[0-9)}]) ?\\(?:text|mbox)\{ ([a-z]+)\}(\^2)?", gold):
        power = found[3] or ""
        yield from (
            found[1],
            f"{found[1]} \\, \\mathrm{{{found[2]}}}{power}",
            f"{found[1]}\\text{{ {found[2]}}}{power}",
        )
    if gold.startswith("\\$"):
        yield from (gold[2:], gold[2:] + "\\text{ dollars}", gold[1:])


@rule(KEEPS, "degrees")
def degrees(gold: str) -> Iterator[str]:
    if found := re.fullmatch(r"([0-9.]+) ?\^\{?\\circ\}?", gold):
        value = found[1]
        yield from (
            value,
            f"{value}^\\circ",
            f"{value}^{{\\circ}}",
            f"{value}°",
            f"{value} \\text{{ degrees}}",
        )
        yield from (f"{value}\\degree", f"{value}^{{\\circ}}.", f"{value} degrees")


@rule(KEEPS, "numbers")
def numbers(gold: str) -> Iterator[str]:
    if re.fullmatch(r"-?\d+", gold):
        yield gold + ".0"
        yield "+" + gold if gold[0] != "-" else "\u2212" + gold[1:]
        if len(gold.lstrip("-")) > 3:
            commas = f"{int(gold):,}"
            yield from (
                commas,
                commas.replace(",", "{,}"),
                commas.replace(",", "\\,"),
                commas.replace(",", ",\\!"),
            )
            yield commas.replace(",", " ")
    elif NUMBER.fullmatch(gold):
        yield gold + "0"
        yield (
            gold.lstrip("0")
            if gold.startswith("0.")
            else ("0" + gold if gold.startswith(".") else "+" + gold)
        )
        value = Fraction(gold)
        if value.denominator > 1:
            yield f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    scientific = re.fullmatch(r"([0-9.]+)(?:e| ?\\times ?10\^\{?)(-?\d+)\}?", gold)
    if scientific:
        mantissa, exponent = scientific.groups()
        yield f"{mantissa} \\times 10^{{{exponent}}}"
        yield f"{mantissa} \\cdot 10^{{{exponent}}}"
        yield f"{mantissa}e{exponent}"
        yield f"{mantissa}\\times10^{{{exponent}}}\\text{{ m/s}}"
    if re.fullmatch(r"[0-9.]+ ?\\?%", gold):
        yield from (
            gold.replace("\\", ""),
            gold.replace("\\", "").replace("%", "\\%"),
            gold.rstrip("\\% "),
        )


@rule(KEEPS, "fractions")
def fractions(gold: str) -> Iterator[str]:
    if found := FRACTION.fullmatch(gold):
        sign, over, under = found.groups()
        yield f"{sign}{over}/{under}"
        yield f"{sign}\\frac{{{over}}}{{{under}}}"
        if sign:
            yield f"\\frac{{-{over}}}{{{under}}}"
        value = Fraction(int(over), int(under))
        if (10**6 * value).denominator == 1:
            yield sign + f"{float(value):.6f}".rstrip("0")
    if found := re.fullmatch(r"(\d+) ?\\frac\{(\d+)\}\{(\d+)\}", gold):
        whole, over, under = map(int, found.groups())
        yield f"\\frac{{{whole * under + over}}}{{{under}}}"
        yield f"{whole} + \\frac{{{over}}}{{{under}}}"


@rule(KEEPS, "names")
def names(gold: str) -> Iterator[str]:
    if found := re.fullmatch(r"[A-Za-z](?:_\{.*\})?(?:\([a-z]\))? ?= ?([^=,]*)", gold):
        yield found[1]
        yield gold.replace("=", " = ")
    elif is_value(gold) and "(" not in gold and NUMBER.search(gold):
        yield f"x = {gold}"
        yield f"S={gold}"
        yield f"\\theta = {gold}"
    elif (found := TUPLE.fullmatch(gold)) and len(split(found[1])) in (2, 3):
        yield f"({', '.join('xyz'[: len(split(found[1]))])}) = {gold}"
    elif len(split(gold)) > 1 and "=" not in gold and not TUPLE.match(gold) and "text" not in gold:
        yield ", ".join(f"x = {part}" for part in split(gold))
        yield "x = " + ", ".join(split(gold))
    if found := re.fullmatch(r"x ?\\in ?(.*)", gold):
        yield found[1]
    elif "\\infty" in gold or "\\cup" in gold:
        yield f"x \\in {gold}"
        yield gold.replace("\\infty", "+\\infty").replace("-+", "-")


@rule(KEEPS, "relations")
def relations(gold: str) -> Iterator[str]:
    turned = {
        "\\ge": "\\le",
        "\\geqslant": "\\leqslant",
        "\\le": "\\ge",
        ">": "<",
        "<": ">",
        "=": "=",
    }
    found = re.fullmatch(r"([^=<>]*?) ?(=|<|>|\\[gl]e(?:qslant)?(?![a-z])) ?([^=<>]*)", gold)
    if found and len(split(gold)) == 1:
        yield f"{found[3]} {turned[found[2]]} {found[1]}"
        yield gold.replace("\\geqslant", "\\geq").replace("=", " = ")
        yield gold.replace("\\geqslant", ">=").replace("=", "=\\ ")


@rule(KEEPS, "lists")
def lists(gold: str) -> Iterator[str]:
    parts = split(gold)
    if len(parts) > 1 and "where" not in gold and "text" not in gold:
        yield ", ".join(parts)
        yield ",".join(parts)
        yield "; ".join(parts)
        yield ", ".join(parts[:-1]) + " \\text{ and } " + parts[-1]
        yield ", ".join(parts[:-1]) + ", \\text{ or } " + parts[-1]
        if "=" not in gold:
            yield "\\{" + ", ".join(parts) + "\\}"


@rule(KEEPS, "order of a set")
def order(gold: str) -> Iterator[str]:
    if gold.startswith("\\{"):
        yield "\\{" + ", ".join(reversed(split(gold[2:-2]))) + "\\}"
    if "\\cup" in gold:
        yield " \\cup ".join(part.strip() for part in reversed(gold.split("\\cup")))
    parts = split(gold)
    if (
        len(parts) > 1
        and "text" not in gold
        and "where" not in gold
        and not re.search(r"=.*,[^=]*$", gold)
    ):
        yield "\\{" + ", ".join(reversed(parts)) + "\\}"


@rule(BY_RULE, "order of a list")
def order_of_list(gold: str) -> Iterator[str]:
    parts = split(gold)
    if (
        len(parts) > 1
        and "text" not in gold
        and "where" not in gold
        and not re.search(r"=.*,[^=]*$", gold)
    ):
        yield ", ".join(reversed(parts))


@rule(BY_RULE, "a whole number as a term")
def term(gold: str) -> Iterator[str]:
    if re.fullmatch(r"\d{2,}", gold):
        yield f"{int(gold) - 3} + 3"
        yield f"\\frac{{{2 * int(gold)}}}{{2}}"
        if (root := round(int(gold) ** 0.5)) ** 2 == int(gold):
            yield f"{root}^2"


@rule(BY_RULE, "a fraction not in lowest terms")
def not_lowest(gold: str) -> Iterator[str]:
    if found := FRACTION.fullmatch(gold):
        yield f"{found[1]}\\frac{{{2 * int(found[2])}}}{{{2 * int(found[3])}}}"


@rule(KEEPS, "\\pm")
def plus_minus(gold: str) -> Iterator[str]:
    if "\\pm" in gold and "{" not in gold.split("\\pm")[0]:
        plus, minus = gold.replace("\\pm", "+"), gold.replace("\\pm", "-")
        yield from (f"{plus}, {minus}", f"{minus}, {plus}", f"{plus} \\text{{ and }} {minus}")
    parts = split(gold)
    if len(parts) == 2 and "(" not in gold:
        if parts[0].replace("+", "-") == parts[1] and parts[0].count("+") == 1:
            yield parts[0].replace("+", "\\pm ")
        if parts[0].lstrip("-") == parts[1].lstrip("-") and parts[0] != parts[1]:
            yield "\\pm " + parts[0].lstrip("-")


@rule(KEEPS, "order of terms")
def terms(gold: str) -> Iterator[str]:
    if not is_value(gold) or not SIMPLE.fullmatch(gold):
        return
    parts = re.findall(r"[-+]?[^-+({]*(?:[({][^({)}]*[)}][^-+({]*)*", gold)
    parts = [part.strip() for part in parts if part.strip()]
    if (
        len(parts) > 1
        and "".join(parts).replace(" ", "") == gold.replace(" ", "")
        and "(" not in gold
    ):
        turned = " ".join(part if part[0] in "+-" else "+" + part for part in reversed(parts))
        yield turned.removeprefix("+").strip()
    if found := re.fullmatch(r"(\d+) ?(\\sqrt\{?\d+\}?|\\pi|[a-z])", gold):
        yield f"{found[2]} \\cdot {found[1]}"
        yield f"{found[1]} \\times {found[2]}"
        yield f"{found[1]}*{found[2]}"


@rule(KEEPS, "equivalent forms")
def equivalent(gold: str) -> Iterator[str]:
    if not is_value(gold) or not SIMPLE.fullmatch(gold) or not re.search(r"sqrt|pi|[a-zA-Z]", gold):
        return
    bare = re.sub(r"\\[a-z]+", "", gold)
    if re.search(r"[a-z]\(|[A-Zei]", bare):
        return  # functions and constants, and capitals, which the library takes for small letters
    from math_verify import parse
    from sympy import Expr, expand, factor, latex, radsimp, together

    read = parse(f"${gold}$")
    if (
        not read
        or not isinstance(read[0], Expr)
        or bool(read[0].free_symbols) != bool(re.search("[a-z]", bare))
    ):
        return
    forms = {latex(read[0].doit())} | {
        latex(form(read[0].doit())) for form in (expand, factor, together, radsimp)
    }
    yield from sorted(forms - {gold})


@rule(KEEPS, "matrices")
def matrices(gold: str) -> Iterator[str]:
    if "begin{pmatrix}" in gold:
        yield gold.replace("pmatrix", "bmatrix")
        yield re.sub(r"(-?)(\d+)/(\d+)", r"\1\\frac{\2}{\3}", gold)
        yield (
            gold.replace("\\begin", "\\left(\\begin")
            .replace("\\end{pmatrix}", "\\end{array}\\right)")
            .replace(
                "{pmatrix}", "{array}{" + "c" * (gold.partition("\\\\")[0].count("&") + 1) + "}"
            )
        )


@rule(CHANGES, "another number")
def another_number(gold: str) -> Iterator[str]:
    if re.fullmatch(r"-?\d+", gold):
        value = int(gold)
        yield from map(str, (value + 1, value - 1, 10 * value or 10, value + 100))
    elif NUMBER.fullmatch(gold):
        yield from (str(float(gold) * 10), gold + "1", "1" + gold.lstrip("-"))


@rule(CHANGES, "digits")
def digits(gold: str) -> Iterator[str]:
    if re.fullmatch(r"\d{2,}", gold):
        yield f"{gold[:-1]} {gold[-1]}"
        yield f"{gold[:-1]},{gold[-1]}"
        yield f"{gold[:-1]}\\,{gold[-1]}"
        yield f"{gold[:-1]}.{gold[-1]}"
        yield f"{gold[:-1]}_{gold[-1]}"
        if gold != gold[::-1] and gold[-1] != "0":
            yield gold[::-1]


@rule(CHANGES, "a number in it")
def last_number(gold: str) -> Iterator[str]:
    found = [*re.finditer(r"\d+", gold)]
    if found and not NUMBER.fullmatch(gold):
        for place in {0, len(found) - 1}:
            start, end = found[place].span()
            yield f"{gold[:start]}{int(found[place][0]) + 1}{gold[end:]}"


@rule(CHANGES, "sign")
def sign(gold: str) -> Iterator[str]:
    if gold not in ("0", "") and (is_value(gold) or TUPLE.fullmatch(gold)) and NUMBER.search(gold):
        yield (
            gold[1:]
            if re.fullmatch(r"-[^-+]*", gold)
            else f"-({gold})"
            if is_value(gold)
            else f"-{gold}"
        )
    if found := re.search(r"(?<=[\w)}]) ?([-+]) ?(?=[\w(\\])", gold):
        yield gold[: found.start()] + (" - " if found[1] == "+" else " + ") + gold[found.end() :]


@rule(CHANGES, "fraction turned over")
def turned_over(gold: str) -> Iterator[str]:
    found = FRACTION.fullmatch(gold)
    if found and found[2] != found[3]:
        yield f"{found[1]}\\frac{{{found[3]}}}{{{found[2]}}}"
        yield f"{found[1]}{found[2]}"


@rule(CHANGES, "rounded")
def rounded(gold: str) -> Iterator[str]:
    if found := FRACTION.fullmatch(gold):
        value = Fraction(int(found[2]), int(found[3]))
        if (10**12 * value).denominator != 1:
            yield from (f"{found[1]}{float(value):.2f}", f"{found[1]}{float(value):.4f}")
    if found := re.fullmatch(r"(\d*) ?\\sqrt\{(\d+)\}", gold):
        yield f"{int(found[1] or 1) * int(found[2]) ** 0.5:.3f}"
    if found := re.fullmatch(r"(\d*) ?\\pi", gold):
        yield f"{int(found[1] or 1) * 3.14:.2f}"


@rule(CHANGES, "brackets")
def other_brackets(gold: str) -> Iterator[str]:
    plain = gold.replace("\\left", "").replace("\\right", "")
    if "\\{" not in plain and re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", plain):
        yield ("[" if plain[0] == "(" else "(") + plain[1:]
        yield plain[:-1] + ("]" if plain[-1] == ")" else ")")
        yield plain[1:-1] if "\\infty" in plain else "\\{" + plain[1:-1] + "\\}"


@rule(CHANGES, "another list")
def another_list(gold: str) -> Iterator[str]:
    parts = split(gold)
    if len(parts) > 1 and "text" not in gold and "where" not in gold:
        yield ", ".join(parts[:-1])
        yield ", ".join(parts[1:])
        yield ", ".join([*parts, parts[0].replace("1", "7") if "1" in parts[0] else "97"])
        yield ", ".join([*parts[:-1], "97"])
    elif is_value(gold):
        yield f"{gold}, 97"
        yield f"97, {gold}"


@rule(CHANGES, "order of a pair")
def pair(gold: str) -> Iterator[str]:
    if (found := TUPLE.fullmatch(gold)) and (parts := split(found[1])) and parts[0] != parts[-1]:
        yield f"({', '.join(reversed(parts))})"


@rule(CHANGES, "a part missing")
def missing(gold: str) -> Iterator[str]:
    if is_value(gold):
        yield from {gold.replace("\\pi", ""), re.sub(r"\\sqrt\{(\d+)\}", r"\1", gold)} - {gold, ""}
        yield from {re.sub(r" ?\^\{?\d\}?", "", gold)} - {gold}
    if "\\pm" in gold:
        yield gold.replace("\\pm", "+")
        yield gold.replace("\\pm", "-")
    if "\\cup" in gold:
        yield gold.split("\\cup")[0].strip()
        yield gold.replace("\\cup", "\\cap")


@rule(CHANGES, "another letter or word")
def letter(gold: str) -> Iterator[str]:
    bare = re.sub(r"\\[a-z]+", lambda found: " " * len(found[0]), gold)
    found = re.search(r"(?<![A-Za-z])[kmnpqrxz](?![A-Za-z(])", bare)
    if is_value(gold) and found:
        yield gold[: found.start()] + "w" + gold[found.end() :]
    if word := WORD.fullmatch(gold):
        yield "\\text{" + ("Q" if len(word[1]) == 1 else "circle") + "}"
        yield word[1] + word[1]
        yield word[1][:-1]
    yield from (
        {gold.replace("\\sin", "\\cos"), gold.replace("\\cos", "\\sin")} - {gold}
        if is_value(gold)
        else ()
    )


@rule(CHANGES, "unit, base, relation")
def other_unit(gold: str) -> Iterator[str]:
    if NUMBER.fullmatch(gold) and gold.strip("0."):
        yield gold + " \\text{ million}"
        yield gold + "^2" if gold != "1" else "1x"
        yield f"{gold} < x"
    if "cm}" in gold or "inches}" in gold or "cents}" in gold:
        yield re.sub(r"cm|inches|cents", "m", gold)
    if found := re.fullmatch(r"(\d+)_\{?(\d)\}?", gold):
        yield f"{found[1]}_{int(found[2]) + 1}"
        yield f"{found[1]}{found[2]}"
    yield from {gold.replace("\\geqslant", "<"), gold.replace("\\in ", "\\notin ")} - {gold}
    if found := re.fullmatch(r"([xyk]) ?= ?([^=,]*)", gold):
        yield f"w={found[2]}"


@rule(CHANGES, "matrix")
def another_matrix(gold: str) -> Iterator[str]:
    if "begin{pmatrix}" in gold and "&" not in gold:
        inner = re.sub(r"\\(begin|end)\{pmatrix\}", "", gold)
        yield f"\\begin{{pmatrix}}{' & '.join(inner.split(chr(92) * 2))}\\end{{pmatrix}}"
        yield f"\\begin{{pmatrix}}{' '.join(inner.split(chr(92) * 2))}\\end{{pmatrix}}"
        yield f"\\begin{{pmatrix}}{(chr(92) * 2).join(reversed(inner.split(chr(92) * 2)))}\\end{{pmatrix}}"
    elif "begin{pmatrix}" in gold:
        yield gold.replace("-1", "1")
