"""Metrics of steps, averaged over the steps between two log lines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

Metrics = dict[str, float]

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

    def flush(self) -> Metrics:
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
