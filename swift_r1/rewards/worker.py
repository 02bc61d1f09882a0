"""What runs inside a reward worker process: loading the plugins once, then calls, group by group.

Everything goes back as plain values and text, so nothing a user's code returns or raises has to be pickled.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.rewards.confine import MEMORY_EXIT, confine, contained, limit_memory
from swift_r1.rewards.construct import Reward, build_reward, describe
from swift_r1.rewards.output import Output
from swift_r1.rewards.remote import TOKEN_VARIABLE
from swift_r1.rewards.types import InvalidReward
from swift_r1.rewards.validate import WrongShape, checked
from swift_r1.rewards.watchdog import put_under_watch
from swift_r1.runtime.processes import end_with_parent

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SELF_DESTRUCT_AFTER = 10.0  # seconds over its limit at which a worker ends itself, its parent being gone

# This process's rewards by name; a text says why one could not be built.
_rewards: dict[str, Reward | str] = {}
_runner: asyncio.Runner | None = None
_output: Output | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """The completions of one call and their columns (each as long as `completions`)."""

    completions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call gave: `values` and `invalid` as of `validate.checked`, or, where the call failed, why.

    `isolate` tells that single completions may be to blame, so that it is worth looking for them; `kind` is the
    failure's, as of `InvalidReward`.
    """

    values: tuple[float | None, ...] = ()
    invalid: tuple[InvalidReward, ...] = ()
    failure: str | None = None
    isolate: bool = False
    kind: str = "exception"


@dataclass(frozen=True, slots=True)
class Readiness:
    """What a worker has after its start: why rewards could not be built, and which of them are coroutines."""

    faults: tuple[str, ...]
    asynchronous: frozenset[str]


def start_worker(
    args: Any, names: Sequence[str], plugins: Sequence[str], mark: str, watchdog: str | None = None
) -> None:
    """Loads the plugins and builds the rewards; what fails is kept and reported by `faults`.

    `mark` is the pool's: this process's children carry it in their environment, so that none can outlive the pool.
    `watchdog` is the address of the process that ends this one with its parent; without one the kernel does, which
    leaves its children alive.

    Raises:
        OSError: the watchdog is gone.
    """
    global _output
    if watchdog is None:
        end_with_parent(signal.SIGKILL)
    else:
        _output = put_under_watch(watchdog)
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = "1"
    _end_noticeably()
    confine(mark, [*args.reward_env, *([TOKEN_VARIABLE] if "api" in names else [])])
    # Ctrl-C and the launcher's SIGTERM reach the whole process group; the trainer decides when its workers end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    load_rewards(args, names, plugins)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    limit_memory(args.reward_memory_limit)


def load_rewards(args: Any, names: Sequence[str], plugins: Sequence[str]) -> None:
    """Builds the rewards of this process; what fails is kept and reported by `faults`."""
    _rewards.clear()
    try:
        from swift_r1.plugins import load_plugins

        load_plugins(list(plugins))
    except UsageError as error:
        _rewards.update(dict.fromkeys(names, str(error)))
        return
    for name in names:
        try:
            _rewards[name] = build_reward(name, args)
        except UsageError as error:
            _rewards[name] = str(error)


def faults() -> list[str]:
    """Why rewards could not be built, one line each."""
    return list(dict.fromkeys(reward for reward in _rewards.values() if isinstance(reward, str)))


def readiness() -> Readiness:
    rewards = [reward for reward in _rewards.values() if isinstance(reward, Reward)]
    return Readiness(tuple(faults()), frozenset(reward.name for reward in rewards if reward.is_async))


def call_reward(
    name: str, items: Sequence[Item], trainer_state: Mapping[str, int], limit: float
) -> tuple[list[Outcome], float]:
    """Calls one reward for each item, one after the other (coroutines together, in one event loop for all calls).

    Args:
        limit: seconds after which the parent kills this process; where the parent is gone, it ends itself.

    Returns:
        One outcome an item, and the seconds that the calls took.
    """
    reward = _rewards[name]
    if isinstance(reward, str):
        return [Outcome(failure=reward)] * len(items), 0.0
    state = {"trainer_state": SimpleNamespace(**trainer_state)}
    started = time.perf_counter()
    with open(os.devnull, "w") as nowhere, contained():
        # A C thread that needs no GIL: it ends even a process that spins inside a C function.
        faulthandler.dump_traceback_later(limit + _SELF_DESTRUCT_AFTER, exit=True, file=nowhere)
        try:
            if reward.is_async:
                outcomes = _runner_of_this_process().run(_call_together(reward, items, state, limit))
            else:
                outcomes = [_call(reward, item, state) for item in items]
        except MemoryError:
            # What is left of its memory may be too little for anything; a new worker starts afresh.
            os._exit(MEMORY_EXIT)
        finally:
            faulthandler.cancel_dump_traceback_later()
    seconds = time.perf_counter() - started
    if _output is not None:
        try:
            _output.end_call()
        except OSError:  # the watchdog was killed, or the reward closed what is not its own: a new worker has both
            os._exit(1)
    return outcomes, seconds


def call_inline(name: str, items: Sequence[Item], trainer_state: Mapping[str, int], limit: float) -> list[Outcome]:
    """Calls one reward in this very process; only a coroutine can be stopped after `limit` seconds."""
    reward = _rewards[name]
    if isinstance(reward, str):
        return [Outcome(failure=reward)] * len(items)
    state = {"trainer_state": SimpleNamespace(**trainer_state)}
    try:
        if reward.is_async:
            return _runner_of_this_process().run(_call_together(reward, items, state, limit))
        return [_call(reward, item, state) for item in items]
    except MemoryError as error:
        return [Outcome(failure=describe(error), isolate=True, kind="memory")] * len(items)


def _call(reward: Reward, item: Item, state: Mapping[str, Any]) -> Outcome:
    try:
        returned = reward.call(item.completions, {**item.columns, **state})
        return _outcome(returned, item)
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  a user's reward may raise anything, SystemExit too
        return Outcome(failure=describe(error), isolate=True)


def _runner_of_this_process() -> asyncio.Runner:
    """All coroutines of this process share one event loop, so that what a reward keeps (an HTTP client with its
    connections, a lock) is still good at its next call. Between two calls the loop stands still."""
    global _runner
    if _runner is None:
        _runner = asyncio.Runner()
    return _runner


def end_loop() -> None:
    """Ends this process's event loop, and what still runs in it."""
    global _runner
    if _runner is not None:
        _runner.close()
        _runner = None


async def _call_together(
    reward: Reward, items: Sequence[Item], state: Mapping[str, Any], limit: float
) -> list[Outcome]:
    """Awaits the items' coroutines side by side; each has its share of `limit` (its completions' time) for itself."""
    size = sum(len(item.completions) for item in items)

    async def one(item: Item) -> Outcome:
        own = limit * len(item.completions) / size
        late = asyncio.timeout(own)
        try:
            async with late:
                returned = await reward.call(item.completions, {**item.columns, **state})
            return _outcome(returned, item)
        except MemoryError:
            raise
        except TimeoutError as error:
            if not late.expired():  # the reward's own
                return Outcome(failure=describe(error), isolate=True)
            return Outcome(failure=f"no answer within {own:g} s", isolate=True, kind="timeout")
        except Exception as error:  # noqa: BLE001  a user's reward may raise anything
            return Outcome(failure=describe(error), isolate=True)

    return list(await asyncio.gather(*map(one, items)))


def _outcome(returned: Any, item: Item) -> Outcome:
    try:
        values, invalid = checked(returned, len(item.completions))
    except WrongShape as error:
        return Outcome(failure=str(error), kind="shape")
    return Outcome(values, invalid)


def _end_noticeably() -> None:
    """Makes `os._exit(0)` in a user's code end with code 1: the pool takes 0 for an orderly end and would wait on."""
    leave = os._exit

    def noticed(status: int) -> None:
        leave(status or 1)

    os._exit = noticed  # type: ignore[assignment]
