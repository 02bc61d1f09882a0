"""What goes into a reward call and what comes out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

RIGHT = 1.0  # a completion is right where its reward is at least this


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
    """What every reward function is called with: `N` completions, whole groups of `group_size`, one after another."""

    completions: Sequence[str]
    # each `N` long: the dataset's columns and `messages`, `prompt_id`, `request_id`, `finish_reason`, `is_truncated`,
    # `response_token_ids`, `dataset`
    columns: Mapping[str, Sequence[Any]]
    group_size: int
    # `global_step`, `max_steps`, given to the rewards as an object with attributes
    trainer_state: Mapping[str, int] = field(default_factory=dict)


def reward_batch(
    completions: Sequence[str],
    data: Sequence[Mapping[str, Any]],
    names: Iterable[str],
    group_size: int,
    trainer_state: Mapping[str, int] | None = None,
    **given: Sequence[Any],
) -> RewardBatch:
    """Returns the batch of these completions.

    Args:
        data: the dataset's columns of each completion, of which all get those in `names`.
        given: the columns that are not the dataset's, `is_truncated` comes with `finish_reason`.
    """
    columns: dict[str, Sequence[Any]] = {name: [own.get(name) for own in data] for name in names}
    for name, column in given.items():
        columns[name] = column
        if name == "finish_reason":
            columns["is_truncated"] = [reason == "length" for reason in column]

    return RewardBatch(completions, columns, group_size, trainer_state or {})


@dataclass(frozen=True, slots=True)
class InvalidReward:
    """Why one completion has no usable reward from one function."""

    index: int  # of the completion in the batch
    cause: str
    # what `rewards/<name>/invalid/<kind>` counts: `value` (not a finite number), `shape` (not one value per
    # completion), `exception`, `timeout`, `died` (its worker process), `memory` (over its limit)
    kind: str = "value"


@dataclass(frozen=True, slots=True)
class RewardColumn:
    """One reward function's values for a batch of `N` completions."""

    name: str
    # `N` floats; NaN where invalid, None where the function had no opinion
    values: tuple[float | None, ...]
    invalid: tuple[InvalidReward, ...]  # one entry for each invalid value
    seconds: float  # time spent in the function, summed over the worker processes


@dataclass(frozen=True, slots=True)
class Item:
    """The completions of one call, mostly a group, and their columns (each as long as `completions`)."""

    completions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """What the call for one item gave: values and invalid rewards, or why it failed."""

    values: tuple[float | None, ...] = ()
    invalid: tuple[InvalidReward, ...] = ()
    failure: str | None = None
    # single completions may be to blame for the failure, so it is worth looking for them
    isolate: bool = False
    kind: str = "exception"  # of the failure, as in `InvalidReward`
