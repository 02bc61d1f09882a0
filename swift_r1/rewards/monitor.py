"""Invalid rewards: written down row by row, and a run that has too large a share of them is stopped."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift_r1.errors import RunFailed
from swift_r1.rewards.types import InvalidReward, RewardBatch, RewardColumn

WINDOW = 20  # steps
CONSTANT_STEPS = 10  # with one and the same value, after which a reward is warned about

_logger = logging.getLogger("swift_r1.rewards")


class InvalidRewardMonitor:
    """Counts invalid rewards of each function over the last 20 steps; `write` takes a row for each.

    The run ends as soon as the share over 20 steps is sure to be above `max_ratio`: a function that never works ends
    it after a few steps, one that fails now and then does not.
    """

    def __init__(self, max_ratio: float, write: Callable[[Mapping[str, Any]], object] = lambda _row: None) -> None:
        self._max_ratio, self._write = max_ratio, write
        self._steps: dict[str, deque[tuple[int, int]]] = {}
        self._constant: dict[str, tuple[float, set[int]]] = {}
        self._warned: set[str] = set()

    def state(self) -> dict[str, Any]:
        return {
            "steps": {name: [list(pair) for pair in steps] for name, steps in self._steps.items()},
            "constant": {name: [value, sorted(steps)] for name, (value, steps) in self._constant.items()},
            "warned": sorted(self._warned),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._steps = {
            name: deque(((bad, count) for bad, count in steps), maxlen=WINDOW) for name, steps in state["steps"].items()
        }
        self._constant = {name: (value, set(steps)) for name, (value, steps) in state["constant"].items()}
        self._warned = set(state["warned"])

    def update(self, columns: Sequence[RewardColumn], batch: RewardBatch) -> None:
        """Takes the columns of one training step; raises RunFailed where a function is over the limit."""
        for column in columns:  # all rows of a step that ends the run are written
            for bad in column.invalid:
                self._write(_invalid_row(column.name, bad, batch))
            self._watch_constant(column, batch.trainer_state.get("global_step", 0))
        for column in columns:
            steps = self._steps.setdefault(column.name, deque(maxlen=WINDOW))
            steps.append((len(column.invalid), len(column.values)))
            invalid = sum(bad for bad, _ in steps)
            expected = sum(count for _, count in steps) / len(steps) * WINDOW
            if column.invalid and invalid > self._max_ratio * expected:
                raise RunFailed(self._message(column, batch, invalid, len(steps)))

    def _watch_constant(self, column: RewardColumn, step: int) -> None:
        """Warns once of a reward that has had one and the same value for 10 steps: it teaches nothing."""
        known = {value for value in column.values if value is not None and not math.isnan(value)}
        if len(known) > 1 or (known and column.name in self._constant and self._constant[column.name][0] not in known):
            self._constant.pop(column.name, None)
        if len(known) != 1 or column.name in self._warned:
            return
        value, steps = self._constant.setdefault(column.name, (known.pop(), set()))
        steps.add(step)
        if len(steps) >= CONSTANT_STEPS:
            self._warned.add(column.name)
            _logger.warning("reward %s was %g for every completion of %d steps", column.name, value, len(steps))

    def _message(self, column: RewardColumn, batch: RewardBatch, invalid: int, steps: int) -> str:
        example = column.invalid[0]
        text = " ".join(batch.completions[example.index].split())
        text = text if len(text) <= 200 else text[:197] + "..."
        return (
            f"reward {column.name} was invalid {invalid} times in the last {steps} steps, more than "
            f"--max_invalid_reward_ratio {self._max_ratio:g} of {WINDOW} steps allows; "
            f"cause: {example.cause}; for example on: {text!r}"
        )


def _invalid_row(name: str, bad: InvalidReward, batch: RewardBatch) -> dict[str, Any]:
    """Which reward failed on what: the completion, and every column that the reward was given."""
    columns = {key: column[bad.index] for key, column in batch.columns.items() if key != "response_token_ids"}
    step = batch.trainer_state.get("global_step", -1) + 1
    row = {"step": step, "reward": name, "kind": bad.kind, "cause": bad.cause}
    return columns | row | {"completion": batch.completions[bad.index]}
