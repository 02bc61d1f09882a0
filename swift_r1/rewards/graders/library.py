"""math_verify, kept from what it cannot handle: it computes exactly and without bounds."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec, module_from_spec
from math import inf, log2
from types import ModuleType
from typing import Any

from swift_r1.rewards.graders.answers import plain, tidied, without_unit

_DOLLARS = re.compile(r"(?<!\\)\$|\\[()\[\]]")
LIBRARY_SECONDS = 5  # per call, where it runs in the main thread
MAX_READ = 400  # characters of an answer
MAX_BITS = 100_000  # of one exact number; a division of two such takes some ten milliseconds
DIGITS = 200  # to which numbers that are not rational are compared
MAX_DIGITS = 1_000  # with which they are computed
MAX_TERMS = 1_000  # of a sum or a product that is written out


def library_equal(given: str, right: str) -> bool:
    """Returns math_verify's verdict on an answer and a gold answer, as they are written. What explodes is wrong."""
    if max(len(given), len(right)) > MAX_READ or not given:
        return False
    return verified(read_alone(right), read_alone(given))


def read_alone(written: str) -> list[Any]:
    """Returns what the library reads in the text of an answer, without its dollars and its unit."""
    value, unit = without_unit(tidied(written))
    return parsed(f"\\boxed{{{value if unit else _DOLLARS.sub('', plain(written))}}}")


def parsed(text: str, **settings: Any) -> list[Any]:
    """Returns what the library reads in a text: sympy objects, not yet evaluated, and strings; empty where it reads
    nothing."""
    from math_verify import parse

    # An answer that takes too long is wrong; a line on standard error for each would be noise.
    logger = logging.getLogger("math_verify")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)
    return list(parse(text, parsing_timeout=_time_limit(), raise_on_error=False, **settings))


def verified(gold: list[Any], answer: list[Any]) -> bool:
    """Returns whether the library takes two things it has read as equal; an answer that explodes, or takes long, is
    not."""
    if not gold or not all(isinstance(item, str) or bearable(item) for item in answer):
        return False
    return bool(
        _grader().verify(
            gold,
            answer,
            allow_set_relation_comp=True,
            timeout_seconds=_time_limit(),
            raise_on_error=False,
        )
    )


@cache
def _grader() -> Any:
    """Returns the library's grader, in a copy whose numbers are equal only where `same_number` has no objection.

    It takes any two numbers for equal that differ by less than 10^-15, and sympy simplifies ln(1 + 10^-70) to 0.
    """
    spec = find_spec("math_verify.grader")
    if spec is None or spec.loader is None:
        raise ImportError("math_verify has no module grader")
    grader: Any = module_from_spec(spec)
    spec.loader.exec_module(grader)
    for name in ("sympy_numeric_eq", "sympy_symbolic_eq"):
        setattr(grader, name, partial(_strictly, getattr(grader, name), grader))
    compare = grader.sympy_expr_eq
    # here, where what sympy raises means unequal
    grader.sympy_expr_eq = lambda a, b, *rest, **more: compare(_exact(a), _exact(b), *rest, **more)
    return grader


def _strictly(
    equal: Callable[..., bool], grader: ModuleType, a: Any, b: Any, *settings: Any
) -> bool:
    return equal(a, b, *settings) and same_number(grader, a, b)


def _exact(item: Any) -> Any:
    """Returns what the library has read with decimals as the fractions that they are: it compares them to six places."""
    from sympy import Float, Rational

    return item.xreplace({number: Rational(str(number)) for number in item.atoms(Float)})


def same_number(grader: ModuleType, a: Any, b: Any) -> bool:
    """Returns whether two sympy expressions are equal: exactly where both are rational, else to `DIGITS` digits.

    Letters and unknown functions get fixed values. Matrices are compared by their elements, and 9 % is 9, as the
    library has it.
    """
    from sympy import Integer, MatrixBase, MatrixExpr, Max, Rational, nan
    from sympy.core.function import AppliedUndef

    if isinstance(a, MatrixBase | MatrixExpr) or all(
        grader.is_atomic_or_pct_atomic(value, Integer) for value in (a, b)
    ):
        return True
    unknown = {part for value in (a, b) for part in value.atoms(AppliedUndef) | value.free_symbols}
    places = list(enumerate(sorted(unknown, key=str)))
    # at large ones a power hides what is added to it, at small ones all is rounded to 0
    for size in (1009, 100909) if places else (0,):
        points = {part: Rational(size + 7 * place, 997) for place, part in places}
        first, second = (value.xreplace(points).doit() for value in (a, b))
        if first.is_Rational and second.is_Rational:
            if first != second:
                return False
            continue
        numbers = (first, second, first - second)
        first, second, difference = (abs(value.evalf(DIGITS, maxn=MAX_DIGITS)) for value in numbers)
        # without a value, such as an integral, there is no objection
        has_value = difference.is_Number and difference is not nan
        if has_value and difference > Max(first, second) * Rational(1, 10**DIGITS):
            return False
    return True


def _time_limit() -> int | None:
    """Returns the time limit, or none outside the main thread: the library's time-outs are alarm signals."""
    return LIBRARY_SECONDS if threading.current_thread() is threading.main_thread() else None


class TooLarge(ValueError):
    """Evaluation would make a number of more than `MAX_BITS` bits."""


def bearable(node: Any) -> bool:
    """Returns whether exact evaluation of a sympy object (expression, set, relation or matrix) stays within the bounds.

    Estimated before anything is evaluated, and only numbers count. What is merely slow, such as expanding
    (x + y)^5000, can be interrupted; a power of whole numbers cannot, and takes all memory.
    """
    try:
        _bits(node)
    except (TooLarge, RecursionError):
        return False
    return True


def _bits(node: Any) -> float:
    """Returns about log2 of an exact value, numerator and denominator together, with letters as 2; at least 1."""
    bits = max(1.0, _estimate(node))
    if bits > MAX_BITS:
        raise TooLarge
    return bits


def _estimate(node: Any) -> float:
    from sympy import Float, MatrixBase, Pow, Product, Rational, Sum, cosh, exp, gamma, sinh
    from sympy.functions.combinatorial.factorials import CombinatorialFunction

    if isinstance(node, MatrixBase):
        return sum(map(_bits, node.flat()))
    if isinstance(node, Rational):
        return int(node.p).bit_length() + int(node.q).bit_length()
    if isinstance(node, Float):
        return int(abs(node.num.exp) + node.num.bc)
    parts = sum(map(_bits, node.args))  # the parts first: what follows evaluates them
    if isinstance(node, Pow):
        return _bits(node.base) * max(1.0, _magnitude(node.exp))
    if isinstance(node, exp | sinh | cosh):
        return max(parts, 2 * _magnitude(node.args[0]))
    if isinstance(node, CombinatorialFunction | gamma):
        largest = max(map(_magnitude, node.args))
        return max(parts, largest * log2(largest + 2))

    if isinstance(node, Sum | Product):
        for _, start, end in node.limits:
            terms = 0.0 if end.is_infinite else _magnitude(start) + _magnitude(end)
            if terms > MAX_TERMS:
                raise TooLarge
            parts *= max(1.0, terms)

    return parts


def _magnitude(node: Any) -> float:
    """Returns the absolute value of a number; 1 for what holds letters, infinity for what is no number."""
    if node.free_symbols:
        return 1.0
    try:
        return abs(complex(node.evalf(5)))
    except (TypeError, ValueError, OverflowError):
        return inf
