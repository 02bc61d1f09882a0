"""Each reward called once on made-up completions, in a process of its own, before any model loads."""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil

from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.launch.checks.rewards import OF_EPISODES, made_up_batch, more, ordinary
from swift_r1.plugins import load_plugins
from swift_r1.rewards import worker
from swift_r1.rewards.pool import RewardPool
from swift_r1.rewards.types import Item, ItemOutcome, RewardBatch
from swift_r1.workers.killing import end_marked, end_whole

_logger = logging.getLogger("swift_r1.rewards")
_SECONDS = 1.8  # for all rewards in the quick check, from when their process can call them
# at which a process is looked at
_MOMENTS = 10
_MOMENT_S = 0.02
_START_S = 30.0  # for that process to start and load the plugins, which this one has loaded already


def quick_faults(args: RlhfArguments, row: Mapping[str, Any], gold: str | None = None) -> list[str]:
    """Says why rewards of the run cannot work, one line each.

    Only what is sure to break the run is a fault: a reward that cannot score any of the ordinary made-up completions,
    not even a group of equal ones. One that waits for longer than the deadline is none: it may wait on a network. One
    that computes all the while gets its whole time limit, as in a run. A judge, which may cost money, is built and not
    asked. Where none gives `gold`, a right completion of the row, more than a wrong one, a warning says so.
    """
    # The user accepts rewards that never work; inline ones may need what only the trainer's process has.
    if args.max_invalid_reward_ratio >= 1 or args.reward_isolation == "inline":
        return []
    batch = made_up_batch([row], [ordinary(gold)], args.max_completion_length)
    deadline = time.monotonic() + _START_S
    mark = secrets.token_hex(8)
    context = multiprocessing.get_context("spawn")  # this process may have threads
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call_all, args=(theirs, args, batch, mark, gold is not None), daemon=True)
    process.start()
    theirs.close()
    faults: list[str] = []
    blind: list[str] = []  # rewards that give a right completion no more than a wrong one
    called = busy = None
    try:
        while mine.poll(max(0.0, deadline - time.monotonic())):
            kind, text = mine.recv()
            if kind == "defect":
                raise RuntimeError(f"the check of the rewards failed in its process:\n{text}")
            if kind == "ready":
                deadline = time.monotonic() + _SECONDS
            elif kind == "called":
                called = text
            else:
                (faults if kind == "fault" else blind).append(text)
        if called is not None and _is_busy(process.pid):
            busy = called
    except EOFError:  # all are called, or a reward ended the process; the run's workers survive that, and report it
        pass
    finally:
        if process.pid is not None and process.is_alive():
            end_whole([process.pid])
        process.join()
        end_marked(mark)
    if busy is not None:
        faults += _busy_fault(args, busy, batch)
    if blind and set(args.called_rewards) <= {*blind, *OF_EPISODES}:
        _logger.warning(
            "no reward gives a right completion more than a wrong one, so there may be nothing to learn (`swift check`)"
        )
    return faults


def _is_busy(pid: int | None) -> bool:
    """Says whether a process computes, rather than waits, at every one of some moments."""
    try:
        process = psutil.Process(pid)
        for _ in range(_MOMENTS):
            if process.status() != psutil.STATUS_RUNNING:
                return False
            time.sleep(_MOMENT_S)
    except psutil.NoSuchProcess:
        return False
    return True


def _busy_fault(args: RlhfArguments, name: str, batch: RewardBatch) -> list[str]:
    """Returns the fault of a reward that is called as in a run, and gives no value within its time limits."""
    limit = args.reward_timeout * len(batch.completions)
    _logger.warning("reward %s computes for long: waiting up to %g s for its first group", name, limit)
    with RewardPool(args, [name], partial(load_plugins, args.external_plugins)) as pool:
        (column,) = pool.score(batch)
    if len(column.invalid) < len(batch.completions):
        return []
    return [_fault(name, column.invalid[0].cause)]


def _fault(name: str, cause: str) -> str:
    return f"--reward_funcs {name} fails on every made-up completion (see `swift check`): {cause}"


def _call_all(answers: Connection, args: RlhfArguments, batch: RewardBatch, mark: str, has_gold: bool) -> None:
    """Runs in its own process: sends ("ready", "") once rewards can be called, then for each ("called", name), and
    ("fault", text), or ("blind", name) where it gives the right completion, the first, no more than the next."""
    try:
        with open(os.devnull, "w") as nowhere:  # plugins have printed what they print when they load
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        worker.start_worker(args, args.called_rewards, partial(load_plugins, args.external_plugins), mark)
        answers.send(("ready", ""))
        unbuilt = worker.faults()
        for fault in unbuilt:
            answers.send(("fault", fault))
        for name in [] if unbuilt else args.called_rewards:
            if name == "judge":
                continue
            answers.send(("called", name))
            outcome = _outcome(name, batch, list(range(len(batch.completions))))
            cause = _sure_cause(name, batch, outcome)
            if cause is not None:
                answers.send(("fault", _fault(name, cause)))
            elif has_gold and name not in OF_EPISODES and outcome.values and not more(*outcome.values[:2]):
                answers.send(("blind", name))
    except Exception:  # noqa: BLE001  what a reward raises is caught where it is called: this is a defect of ours
        answers.send(("defect", traceback.format_exc()))
    answers.close()


def _sure_cause(name: str, batch: RewardBatch, outcome: ItemOutcome) -> str | None:
    """Says why no completion gets a value from this reward, given its outcome of the batch; None where one does."""
    if outcome.failure is not None and outcome.isolate:
        # One odd completion may be to blame: a group of each one alone tells.
        outcomes = [_outcome(name, batch, [index] * 2) for index in range(len(batch.completions))]
        return outcome.failure if all(one.failure is not None for one in outcomes) else None
    if outcome.failure is not None:
        return outcome.failure
    all_invalid = outcome.invalid and len(outcome.invalid) == len(outcome.values)
    return outcome.invalid[0].cause if all_invalid else None


def _outcome(name: str, batch: RewardBatch, picks: Sequence[int]) -> ItemOutcome:
    columns = {key: [column[index] for index in picks] for key, column in batch.columns.items()}
    item = Item([batch.completions[index] for index in picks], columns)
    return worker.call_reward(name, [item], batch.trainer_state, _SECONDS)[0][0]
