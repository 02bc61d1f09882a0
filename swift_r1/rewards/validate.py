"""What a reward function returned -> one checked value a completion."""

from __future__ import annotations

import math
import numbers
from typing import Any

from swift_r1.rewards.types import InvalidReward


class WrongShape(ValueError):
    """The function did not return one value for each completion; none of its values can be trusted."""


def checked(returned: Any, count: int) -> tuple[tuple[float | None, ...], tuple[InvalidReward, ...]]:
    """Checks what a call with `count` completions returned: a sequence (list, tuple, array) of `count` values.

    Numbers and booleans are taken as floats and None is kept ("no opinion"); NaN, infinity and anything else are
    invalid. Nothing is ever broadcast.

    Returns:
        `count` values (NaN where invalid), and the invalid ones with their cause.

    Raises:
        WrongShape: one value for the whole batch, a wrong number of values, or no sequence at all.
    """
    if hasattr(returned, "tolist"):  # numpy arrays and torch tensors, whichever library the plugin uses
        returned = returned.tolist()
    if isinstance(returned, numbers.Real):
        raise WrongShape(f"returned one value ({returned!r}) for {count} completions, not a list of {count}")
    if not isinstance(returned, list | tuple):
        raise WrongShape(f"returned a {type(returned).__name__}, not a list of {count} values")
    if len(returned) != count:
        raise WrongShape(f"returned {len(returned)} values for {count} completions")
    values: list[float | None] = []
    invalid: list[InvalidReward] = []
    for index, item in enumerate(returned):
        value, cause = _value(item)
        values.append(value)
        if cause is not None:
            invalid.append(InvalidReward(index, cause))
    return tuple(values), tuple(invalid)


def _value(item: Any) -> tuple[float | None, str | None]:
    if item is None:
        return None, None
    if hasattr(item, "item") and not isinstance(item, numbers.Real):  # a tensor of one element in a list
        try:
            item = item.item()
        except (RuntimeError, ValueError, TypeError):
            return math.nan, f"a {type(item).__name__} is not one number"
    if not isinstance(item, numbers.Real):
        return math.nan, f"{_short(item)} is a {type(item).__name__}, not a number"
    try:
        value = float(item)
    except OverflowError:
        return math.nan, "too large for a float"
    if not math.isfinite(value):
        return math.nan, f"{value} is not a finite number"
    return value, None


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 60 else text[:57] + "..."
