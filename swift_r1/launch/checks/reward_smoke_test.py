"""Each reward called once on made-up completions, by a pool as the run's, before any model loads."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from functools import partial
from typing import Any

import psutil

from swift_r1.errors import UsageError
from swift_r1.flags.run import RunFlags
from swift_r1.launch.checks.rewards import (
    OF_EPISODES,
    RIGHT,
    made_up_batch,
    ordinary,
    tells_right,
)
from swift_r1.plugins import load_plugins
from swift_r1.rewards.batch import RewardCall
from swift_r1.rewards.pool import RewardPool
from swift_r1.rewards.types import Item, ItemOutcome, RewardBatch

_logger = logging.getLogger("swift_r1.rewards")
_SECONDS = 1.8  # for all rewards in the quick check, from when the worker can call them
# at which the worker is looked at
_MOMENTS = 10
_MOMENT_S = 0.02
_ENDED = ("died", "memory")  # of calls that end their worker: the run survives that, and reports it


def quick_faults(
    args: RunFlags, row: Mapping[str, Any], golds: Sequence[str | None] = (None,)
) -> list[str]:
    """Says why rewards of the run cannot work, one line each.

    Only what is sure to break the run is a fault: a reward that cannot score any of the ordinary made-up completions,
    not even a group of equal ones. One that waits for longer than the deadline is none: it may wait on a network. One
    that computes all the while gets its whole time limit, as in a run. A judge, which may cost money, is built and not
    asked. Where none gives the first of `golds`, a right completion of the row, more than a wrong one, as those of
    other rows are, a warning says so.

    Raises RunFailed: no worker is up within its deadline, as in the run.
    """
    # The user accepts rewards that never work; inline ones may need what only the trainer's process has.
    if args.max_invalid_reward_ratio >= 1 or args.reward_isolation == "inline":
        return []
    group = ordinary(golds)[0]
    batch = made_up_batch([row], [group], args)
    faults: list[str] = []
    blind: list[str] = []  # rewards that give a right completion no more than a wrong one
    busy = None
    load = partial(_load_in_silence, args.external_plugins)
    # no call ends before the deadline of all
    patient = replace(args, reward_num_workers=1, reward_timeout=_SECONDS)
    with RewardPool(patient, args.called_rewards, load) as pool:
        try:
            pool.wait_ready()
        except UsageError as error:
            return list(error.faults)
        tried = partial(_tried, pool, batch, time.monotonic() + _SECONDS)
        places = range(len(batch.completions))
        for name in args.called_rewards:
            if name == "judge":
                continue
            try:
                [outcome] = tried(name, [places])
                if outcome.kind in _ENDED:
                    break
                cause = _sure_cause(
                    outcome, partial(tried, name, [[place] * 2 for place in places])
                )
            except TimeoutError:
                busy = (
                    name if any(map(_computes, psutil.Process().children(recursive=True))) else None
                )
                break
            if cause is not None:
                faults.append(_fault(name, cause))
            elif (
                RIGHT in group
                and name not in OF_EPISODES
                and outcome.values
                and not tells_right(name, dict(zip(group, outcome.values, strict=True)))
            ):
                blind.append(name)
    if busy is not None:
        faults += _busy_fault(args, busy, batch)
    if blind and set(args.called_rewards) <= {*blind, *OF_EPISODES}:
        _logger.warning(
            "no reward gives a right completion more than a wrong one, so there may be nothing to learn (`swift check`)"
        )
    return faults


def _tried(
    pool: RewardPool,
    batch: RewardBatch,
    deadline: float,
    name: str,
    groups: Sequence[Sequence[int]],
) -> list[ItemOutcome]:
    """Returns what a reward makes of each group of the batch's completions, given by their places. Raises TimeoutError:
    it has not answered before the deadline, and goes on."""
    items = []
    for picks in groups:
        columns = {key: [column[index] for index in picks] for key, column in batch.columns.items()}
        items.append(Item([batch.completions[index] for index in picks], columns))
    submitted = pool.submit([RewardCall(None, name, tuple(items))], batch.trainer_state)
    left = deadline - time.monotonic()
    if futures.wait([one.given for one in submitted], max(0.0, left)).not_done:
        raise TimeoutError
    [answer] = pool.run([], batch.trainer_state, deadline, submitted)
    return answer.outcomes


def _sure_cause(outcome: ItemOutcome, of_each_alone: Callable[[], list[ItemOutcome]]) -> str | None:
    """Says why no completion gets a value from a reward, given its outcome of the batch; None where one does. Where the
    call failed `of_each_alone` makes the calls with one completion each: one odd one may be to blame."""
    if outcome.failure is not None:
        blames_one = outcome.isolate and any(alone.failure is None for alone in of_each_alone())
        return None if blames_one else outcome.failure
    all_invalid = outcome.invalid and len(outcome.invalid) == len(outcome.values)
    return outcome.invalid[0].cause if all_invalid else None


def _load_in_silence(plugins: Sequence[str]) -> None:
    """Loads plugins in a worker that shows nothing: they have printed what they print when they load."""
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    load_plugins(plugins)


def _computes(process: psutil.Process) -> bool:
    """Says whether a process computes, rather than waits, at every one of some moments."""
    try:
        for _ in range(_MOMENTS):
            if process.status() != psutil.STATUS_RUNNING:
                return False
            time.sleep(_MOMENT_S)
    except psutil.NoSuchProcess:
        return False
    return True


def _busy_fault(args: RunFlags, name: str, batch: RewardBatch) -> list[str]:
    """Returns the fault of a reward that is called as in a run, and gives no value within its time limits."""
    limit = args.reward_timeout * len(batch.completions)
    _logger.warning(
        "reward %s computes for long: waiting up to %g s for its first group", name, limit
    )
    with RewardPool(args, [name], partial(load_plugins, args.external_plugins)) as pool:
        (column,) = pool.score(batch)
    if len(column.invalid) < len(batch.completions):
        return []
    return [_fault(name, column.invalid[0].cause)]


def _fault(name: str, cause: str) -> str:
    return f"--reward_funcs {name} fails on every made-up completion (see `swift check`): {cause}"
