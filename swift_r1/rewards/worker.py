"""What runs inside a reward worker process: loading the plugins once, then calls, group by group.

Results are plain values and text, so nothing that a user's code returns or raises has to be pickled.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from swift_r1.errors import UsageError, a_kind, describe
from swift_r1.rewards.orm import Reward, build_reward
from swift_r1.rewards.remote import TOKEN_VARIABLE
from swift_r1.rewards.types import InvalidReward, Item, ItemOutcome, RewardFlags
from swift_r1.workers.worker import guarded

# This process's rewards by name; a text says why one could not be built.
_rewards: dict[str, Reward | str] = {}
_runner: asyncio.Runner | None = None


def load_nothing() -> None: ...


def server_keys(args: RewardFlags, names: Sequence[str]) -> list[str]:
    """Returns the variables with what the built-in rewards show to a server."""
    keys = [TOKEN_VARIABLE] if "api" in names else []
    if "judge" in names and (judge := getattr(args, "judge", None)) is not None:
        from swift_r1.rewards.judge_config import KEY_VARIABLE, read_judge

        keys.append(read_judge(judge).api_key_env or KEY_VARIABLE)
    return keys


def load_rewards(args: RewardFlags, names: Sequence[str], load: Callable[[], object]) -> None:
    """Builds the rewards of this process, once `load` has registered what plugins have; what fails is kept and reported
    by `faults`."""
    _rewards.clear()
    try:
        load()
    except UsageError as error:
        _rewards.update(dict.fromkeys(names, str(error)))
        return
    for name in names:
        try:
            _rewards[name] = build_reward(name, args)
        except UsageError as error:
            _rewards[name] = str(error)


def faults() -> list[str]:
    """Returns why rewards could not be built, one line each."""
    return list(dict.fromkeys(reward for reward in _rewards.values() if isinstance(reward, str)))


def asynchronous_rewards() -> tuple[list[str], frozenset[str]]:
    """Returns the `faults`, and the names of the rewards that are coroutines."""
    return faults(), frozenset(
        name for name, reward in _rewards.items() if isinstance(reward, Reward) and reward.is_async
    )


def call_reward(
    name: str, items: Sequence[Item], trainer_state: Mapping[str, int], limit: float
) -> tuple[list[ItemOutcome], float]:
    """Calls one reward for each item in a worker process: one outcome per item, and the seconds that the calls took.
    The parent kills this process after `limit` seconds; where the parent is gone, it ends itself."""
    reward = _rewards[name]
    if isinstance(reward, str):
        return [ItemOutcome(failure=reward)] * len(items), 0.0
    with guarded(limit):
        started = time.perf_counter()
        outcomes = _call_all(reward, items, trainer_state, limit)
        seconds = time.perf_counter() - started
    return outcomes, seconds


def call_inline(
    name: str, items: Sequence[Item], trainer_state: Mapping[str, int], limit: float
) -> list[ItemOutcome]:
    """Calls one reward in the trainer's process; only a coroutine can be stopped after `limit` seconds."""
    reward = _rewards[name]
    assert isinstance(reward, Reward), reward
    try:
        return _call_all(reward, items, trainer_state, limit)
    except MemoryError as error:
        return [ItemOutcome(failure=describe(error), isolate=True, kind="memory")] * len(items)


def _call_all(
    reward: Reward, items: Sequence[Item], trainer_state: Mapping[str, int], limit: float
) -> list[ItemOutcome]:
    """Calls a reward for one item after the other, or for all together where it is a coroutine.

    All coroutines of this process share one event loop, so that what a reward keeps (an HTTP client with its
    connections, a lock) is still good at its next call. Between two calls the loop stands still.
    """
    global _runner
    state = {"trainer_state": SimpleNamespace(**trainer_state)}
    if not reward.is_async:
        together = getattr(reward.function, "takes_groups_together", False) and len(items) > 1
        outcomes = _call_joined(reward, items, state) if together else None
        return outcomes or [_call(reward, item, state) for item in items]
    _runner = _runner or asyncio.Runner()
    return _runner.run(_call_together(reward, items, state, limit))


def _call(reward: Reward, item: Item, state: Mapping[str, Any]) -> ItemOutcome:
    columns = item.columns
    # ms-swift's: the samples of each conversation, which is one here
    if "rollout_infos" in columns:
        samples = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        state = {**state, "trajectory_inputs": {one["request_id"]: [one] for one in samples}}
    try:
        return checked(reward.call(item.completions, {**columns, **state}), len(item.completions))
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  a user's reward may raise anything, SystemExit too
        return ItemOutcome(failure=describe(error), isolate=True)


def _call_joined(
    reward: Reward, items: Sequence[Item], state: Mapping[str, Any]
) -> list[ItemOutcome] | None:
    """Calls a reward once for all items; None where it fails."""
    sizes = [len(item.completions) for item in items]
    texts = [text for item in items for text in item.completions]
    columns = {
        name: [value for item in items for value in item.columns[name]] for name in items[0].columns
    }
    whole = _call(reward, Item(texts, columns), state)
    if whole.failure is not None:
        return None
    outcomes = []
    for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
        own = (bad for bad in whole.invalid if end - size <= bad.index < end)
        invalid = tuple(replace(bad, index=bad.index - end + size) for bad in own)
        outcomes.append(ItemOutcome(whole.values[end - size : end], invalid))
    return outcomes


def rest() -> None:
    """Tells the models among the rewards of this process that a batch is scored."""
    for reward in _rewards.values():
        function: Any = getattr(reward, "function", None)
        if getattr(function, "takes_groups_together", False):
            function.rest()


def end_loop() -> None:
    """Ends this process's event loop, and what still runs in it."""
    global _runner
    if _runner is not None:
        _runner.close()
        _runner = None


async def _call_together(
    reward: Reward, items: Sequence[Item], state: Mapping[str, Any], limit: float
) -> list[ItemOutcome]:
    """Awaits the items' coroutines side by side; each has its share of `limit` (its completions' time) for itself."""
    size = sum(len(item.completions) for item in items)

    async def one(item: Item) -> ItemOutcome:
        own = limit * len(item.completions) / size
        late = asyncio.timeout(own)
        try:
            async with late:
                returned = await reward.call(item.completions, {**item.columns, **state})
            return checked(returned, len(item.completions))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  a user's reward may raise anything, a TimeoutError of its own too
            if isinstance(error, TimeoutError) and late.expired():
                return ItemOutcome(
                    failure=f"no answer within {own:g} s", isolate=True, kind="timeout"
                )
            return ItemOutcome(failure=describe(error), isolate=True)

    return list(await asyncio.gather(*map(one, items)))


def checked(returned: Any, count: int) -> ItemOutcome:
    """Returns what a call with `count` completions returned: a sequence (list, tuple, array) of `count` values, or a
    failure.

    Numbers and booleans are taken as floats and None is kept ("no opinion"); NaN, infinity and anything else are
    invalid, an exception for its own cause. Nothing is ever broadcast.
    """
    # numpy arrays and torch tensors, whichever library the plugin uses
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple) or len(returned) != count:
        if isinstance(returned, numbers.Real):
            failure = (
                f"returned one value ({returned!r}) for {count} completions, not a list of {count}"
            )
        elif not isinstance(returned, list | tuple):
            failure = f"returned {a_kind(returned)}, not a list of {count} values"
        else:
            failure = f"returned {len(returned)} values for {count} completions"
        return ItemOutcome(failure=failure, kind="shape")
    values: list[float | None] = []
    invalid: list[InvalidReward] = []
    for index, item in enumerate(returned):
        if isinstance(item, Exception):
            values.append(math.nan)
            invalid.append(InvalidReward(index, describe(item), "exception"))
            continue
        try:
            values.append(None if item is None else _number(item))
        except ValueError as error:
            values.append(math.nan)
            invalid.append(InvalidReward(index, str(error)))
    return ItemOutcome(tuple(values), tuple(invalid))


def _number(item: Any) -> float:
    """Raises ValueError with the cause where it is not a finite number."""
    # a tensor of one element in a list
    if hasattr(item, "item") and not isinstance(item, numbers.Real):
        try:
            item = item.item()
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(f"{a_kind(item)} is not one number") from error
    if not isinstance(item, numbers.Real):
        text = repr(item)
        text = text if len(text) <= 60 else text[:57] + "..."
        raise ValueError(f"{text} is {a_kind(item)}, not a number")
    try:
        value = float(item)
    except OverflowError as error:
        raise ValueError("too large for a float") from error
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    return value
