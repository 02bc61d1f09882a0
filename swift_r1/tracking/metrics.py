"""Metrics of steps: measured, averaged over the steps between two log lines, and written as JSON lines."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

_MAXIMUM = ("completions/max_length", "rollout/weight_check")
_LATEST = ("rollout/weight_version", "learning_rate", "step")


class MetricWindow:
    """Collects each step's metrics and gives their mean: the maximum or the latest where a mean says nothing."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._values[name].append(value)

    def state(self) -> dict[str, list[float]]:
        """What is in the window, for a checkpoint."""
        return {name: list(values) for name, values in self._values.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        self._values.clear()
        self._values.update({name: list(values) for name, values in state.items()})

    def flush(self) -> dict[str, float]:
        """The window's metrics; it is empty afterwards. NaN entries do not count."""
        merged = {name: _merge(name, values) for name, values in self._values.items()}
        self._values.clear()
        return merged


def _merge(name: str, values: list[float]) -> float:
    if name in _LATEST:
        return values[-1]
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    return max(known) if name in _MAXIMUM else sum(known) / len(known)


class Stopwatch:
    """Adds up wall-clock seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


class JsonLines:
    """Appends objects to `path`. Non-finite numbers become null, so that every line is standard JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json_line(row))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def json_line(row: Mapping[str, Any]) -> str:
    """One line of standard JSON, its end included."""
    return json.dumps(_standard(row), ensure_ascii=False, allow_nan=False) + "\n"


def _standard(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _standard(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(item) for item in value]
    if value is None or isinstance(value, str | int | bool):
        return value
    # A dataset column may hold anything; what JSON cannot say is written as text rather than lost.
    return str(value)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
