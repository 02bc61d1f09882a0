"""The typed ends of the rewards package: what goes into a reward call and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """What every reward function is called with: `N` completions, whole groups, group by group.

    Attributes:
        completions: `N` completion texts.
        columns: each `N` long: the dataset's columns and `messages`, `prompt_id`, `request_id`,
            `finish_reason`, `is_truncated`, `response_token_ids`, `dataset`.
        group_size: completions a prompt; group `g` is the rows `[g * group_size, (g + 1) * group_size)`.
        trainer_state: `global_step`, `max_steps`, given to the rewards as an object with attributes.
    """

    completions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    group_size: int
    trainer_state: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InvalidReward:
    """Why one completion has no usable reward from one function.

    Attributes:
        index: of the completion in the batch.
        cause: one line.
        kind: what `rewards/<name>/invalid/<kind>` counts: `value` (not a finite number), `shape` (not one value a
            completion), `exception`, `timeout`, `died` (its worker process), `memory` (over its limit).
    """

    index: int
    cause: str
    kind: str = "value"


@dataclass(frozen=True, slots=True)
class RewardColumn:
    """One reward function's answer for a batch of `N` completions.

    Attributes:
        name: the registered name, the key of all metrics.
        values: `N` floats; NaN where invalid, `None` where the function had no opinion.
        invalid: one entry for each invalid value, with its cause.
        seconds: time spent in the function, summed over the worker processes.
    """

    name: str
    values: tuple[float | None, ...]
    invalid: tuple[InvalidReward, ...]
    seconds: float
