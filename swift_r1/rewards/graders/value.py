r"""The value of an expression in LaTeX, in bounded time: exact fractions where it is rational, else 60 digits.

Letters are variables and get fixed rational values, several sets of them: two expressions that agree in all of them
are taken as equal (the identity test of Schwartz and Zippel, with fixed points). Nothing is expanded or simplified,
so the work is linear in the text. Length, depth, exponents and the size of numbers are bounded.
"""

from __future__ import annotations

from mpmath.libmp.libhyper import NoConvergence

from swift_r1.rewards.graders.bounded import Unreadable, Value, close
from swift_r1.rewards.graders.reader import Reader
from swift_r1.rewards.graders.tokens import tokens

POINTS = 3  # sets of values of the variables; the first has positive values only, the others both signs
POINTS_ROUNDED = 32  # where something is rounded; the later ones are large


def values(text: str) -> tuple[Value, ...]:
    """The expression's value at each point; one value where it has no variables.

    Raises:
        Unreadable: see there; nothing else, whatever the text.
    """
    read = tokens(text)
    found: list[Value] = []
    wanted = 1
    while len(found) < wanted:
        reader = Reader(read, len(found) + 1)
        try:
            found.append(reader.whole())
        except (ZeroDivisionError, OverflowError, NoConvergence, TypeError) as error:
            raise Unreadable(str(error)) from error
        if reader.variables:
            wanted = POINTS_ROUNDED if reader.rounded else POINTS
    return tuple(found)


def same(first: tuple[Value, ...], second: tuple[Value, ...]) -> bool:
    """Whether two expressions are equal: exactly where both are rational, else to 48 digits, at every point that
    both have."""
    longest = max(len(first), len(second))
    first, second = (item * longest if len(item) == 1 else item for item in (first, second))
    return all(map(close, first, second))
