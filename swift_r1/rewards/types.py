"""What goes into a reward call and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class RewardFlags(Protocol):
    """The flags that are read here; reward classes get the whole object that has them."""

    @property
    def reward_timeout(self) -> float: ...

    @property
    def reward_num_workers(self) -> int: ...

    @property
    def reward_memory_limit(self) -> float: ...

    @property
    def reward_env(self) -> Sequence[str]: ...

    @property
    def reward_isolation(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """What every reward function is called with: `N` completions, whole groups of `group_size`, one after another.

    Attributes:
        columns: each `N` long: the dataset's columns and `messages`, `prompt_id`, `request_id`, `finish_reason`,
            `is_truncated`, `response_token_ids`, `dataset`.
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
        kind: what `rewards/<name>/invalid/<kind>` counts: `value` (not a finite number), `shape` (not one value per
            completion), `exception`, `timeout`, `died` (its worker process), `memory` (over its limit).
    """

    index: int
    cause: str
    kind: str = "value"


@dataclass(frozen=True, slots=True)
class RewardColumn:
    """One reward function's values for a batch of `N` completions.

    Attributes:
        values: `N` floats; NaN where invalid, None where the function had no opinion.
        invalid: one entry for each invalid value.
        seconds: time spent in the function, summed over the worker processes.
    """

    name: str
    values: tuple[float | None, ...]
    invalid: tuple[InvalidReward, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Item:
    """The completions of one call, mostly a group, and their columns (each as long as `completions`)."""

    completions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """What the call for one item gave: values and invalid rewards, or why it failed.

    Attributes:
        isolate: single completions may be to blame for the failure, so it is worth looking for them.
        kind: of the failure, as in `InvalidReward`.
    """

    values: tuple[float | None, ...] = ()
    invalid: tuple[InvalidReward, ...] = ()
    failure: str | None = None
    isolate: bool = False
    kind: str = "exception"
