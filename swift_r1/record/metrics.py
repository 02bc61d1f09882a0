"""Metrics of steps: averaged over the steps between two log lines, and written as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Self

from swift_r1.runtime.files import regular

_MAXIMUM = ("completions/max_length", "rollout/weight_check", "rollout/ratio_max")
_LATEST = ("rollout/weight_version", "learning_rate", "step")


def merged(window: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the mean of each metric over its steps, without NaN; the maximum or the latest where a mean says
    nothing."""
    found: dict[str, float] = {}
    for name, values in window.items():
        known = [value for value in values if not math.isnan(value)]
        if name in _LATEST:
            found[name] = values[-1]
        elif name in _MAXIMUM:
            found[name] = max(known, default=math.nan)
        else:
            found[name] = sum(known) / len(known) if known else math.nan
    return found


def slowdown(what: str, times: Sequence[float]) -> dict[str, float]:
    """`time/<what>_slowdown`: how many times as long as the median of the others the slowest takes, and
    `time/slowest_<what>`, its number. Those with a time of 0 did nothing; of one alone there is nothing to say."""
    known = {number: seconds for number, seconds in enumerate(times) if seconds > 0}
    if len(known) < 2:
        return {}
    slowest = max(known, key=known.__getitem__)
    others = median(seconds for number, seconds in known.items() if number != slowest)
    return {
        f"time/{what}_slowdown": known[slowest] / others,
        f"time/slowest_{what}": float(slowest),
    }


class JsonLines:
    """Appends objects to `path`. Non-finite numbers become null, so that every line is standard JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(standard_json(row), ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def standard_json(value: Any, not_finite: Callable[[float], Any] = lambda _value: None) -> Any:
    """Returns what JSON can say of a value; it has no non-finite numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else not_finite(value)
    if isinstance(value, Mapping):
        return {str(key): standard_json(item, not_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [standard_json(item, not_finite) for item in value]
    if value is None or isinstance(value, str | int | bool):
        return value
    # A dataset column may hold anything; what JSON cannot say is written as text rather than lost.
    return str(value)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file, a line each: lines end with a newline alone, and texts may hold other separators."""
    with open(path, "rb", opener=regular) as file:
        return list(map(json.loads, file))
