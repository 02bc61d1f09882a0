"""Numbers of bounded size: exact fractions while everything is rational, else 240 digits, real or complex."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from mpmath.ctx_mp import MPContext

MAX_BITS = 20_000  # of an exact number
MAX_EXPONENT = 5_000
MAX_FACTORIAL = 300
MAX_ABSORBED = 600  # bits by which a summand may be smaller, of 800
MAX_LOST = 120  # bits by which a sum may be smaller than its summands

mp = MPContext()
mp.dps = 240
_TOLERANCE = mp.mpf(10) ** -200

Value = Any  # a Fraction where exact, else an mpf or mpc of `mp`


class Unreadable(ValueError):
    """Not an expression that this reader knows, beyond its bounds, or without a value (1/0)."""


def close(a: Value, b: Value) -> bool:
    """Says whether two values are equal: exactly where both are exact, else to 200 digits."""
    a, b = _alike(a, b)
    return (
        a == b if isinstance(a, Fraction) else bool(abs(a - b) <= _TOLERANCE * max(abs(a), abs(b)))
    )


def real(value: Value) -> Value:
    """Returns a value in 240 digits; one that is not exact stays as it is."""
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _alike(a: Value, b: Value) -> tuple[Value, Value]:
    """Returns the two values, both exact or neither."""
    return (a, b) if isinstance(a, Fraction) and isinstance(b, Fraction) else (real(a), real(b))


def bounded(value: Value) -> Value:
    """Returns the value. Raises Unreadable where it is too large."""
    if isinstance(value, Fraction):
        if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
            raise Unreadable("number too large")
    elif not mp.isfinite(value) or (value and abs(mp.mag(value)) > MAX_BITS):
        raise Unreadable("number too large")
    return value


def _checked(operation: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    return lambda a, b: bounded(operation(*_alike(a, b)))


multiply, divide = map(_checked, (operator.mul, operator.truediv))


def add(a: Value, b: Value) -> Value:
    """Returns the sum. Raises Unreadable: it is too large, or too few digits of the smaller number, or of both, are left
    in it to compare it by."""
    a, b = _alike(a, b)
    value = a + b
    if not isinstance(value, Fraction) and a and b:
        largest = max(mp.mag(a), mp.mag(b))
        if largest - min(mp.mag(a), mp.mag(b)) > MAX_ABSORBED or largest - mp.mag(value) > MAX_LOST:
            raise Unreadable("too few digits are left")
    return bounded(value)


def subtract(a: Value, b: Value) -> Value:
    return add(a, -b)


def power(base: Value, exponent: Value) -> Value:
    """Returns the power, exact where a fraction has a whole exponent. Raises Unreadable: it is too large, or has no
    value."""
    if isinstance(exponent, Fraction) and abs(exponent) > MAX_EXPONENT:
        raise Unreadable("exponent too large")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = base.numerator.bit_length() + base.denominator.bit_length()
        if bits * abs(exponent.numerator) > MAX_BITS:
            raise Unreadable("number too large")
        return base**exponent.numerator

    if isinstance(base, Fraction) and exponent == Fraction(1, 2):
        return root(base, Fraction(2))

    base = real(base)
    exponent = real(exponent)
    if base == 0:
        if mp.re(exponent) <= 0:
            raise Unreadable("0 to a power that is not positive")
        return Fraction(0)

    if abs(exponent * mp.log(base)) > MAX_BITS:
        raise Unreadable("number too large")
    return bounded(base**exponent)


def root(value: Value, index: Value) -> Value:
    """Returns the root of an exact index. Raises Unreadable: the index is another, or the root too large."""
    if index == 3 and isinstance(value, Fraction) and value < 0:  # the real root
        return -power(-value, Fraction(1, 3))
    if not isinstance(index, Fraction) or index == 0:
        raise Unreadable("root of an odd kind")
    if index == 2:
        return bounded(mp.sqrt(real(value)))
    return power(value, 1 / index)


def factorial(value: Value) -> Value:
    """Returns the factorial of a whole number up to `MAX_FACTORIAL`. Raises Unreadable for any other value."""
    if not is_small_whole(value):
        raise Unreadable("factorial out of bounds")
    return Fraction(math.factorial(int(value)))


def is_small_whole(value: Value) -> bool:
    """Says whether a value is a whole number from 0 to `MAX_FACTORIAL`."""
    return isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= MAX_FACTORIAL
