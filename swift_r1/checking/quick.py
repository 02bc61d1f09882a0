"""The check of rewards at the start of every `swift rlhf`: silent, and never longer than its deadlines.

Only what is sure to break the run is a fault: a reward that cannot score any of the ordinary made-up completions, not
even a group of equal ones. A reward that needs longer than the deadline is no fault: it may wait on a network.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.checking.rewards import made_up_batch, ordinary
from swift_r1.plugins import load_plugins
from swift_r1.rewards.confine import end_strays, end_whole
from swift_r1.rewards.types import Item, ItemOutcome, RewardBatch
from swift_r1.rewards.worker import call_reward, faults, start_worker

SECONDS = 1.8
"""For all rewards, from when their process can call them."""
_START_S = 30.0
"""For that process to start and load the plugins, which this one has loaded already."""


def quick_faults(args: RlhfArguments, row: Mapping[str, Any]) -> list[str]:
    """Why rewards of the run cannot work, one line each; [] also for those that did not answer in time."""
    # The user accepts rewards that never work; inline ones may need what only the trainer's process has.
    if args.max_invalid_reward_ratio >= 1 or args.reward_isolation == "inline":
        return []
    batch = made_up_batch([row], [ordinary(None)], args.max_completion_length)
    deadline = time.monotonic() + _START_S
    mark = secrets.token_hex(8)
    context = multiprocessing.get_context("spawn")  # this process may have threads
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call_all, args=(theirs, args, batch, mark), daemon=True)
    process.start()
    theirs.close()
    found: list[str] = []
    try:
        while mine.poll(max(0.0, deadline - time.monotonic())):
            kind, text = mine.recv()
            if kind == "defect":
                raise RuntimeError(f"the check of the rewards failed in its process:\n{text}")
            if kind == "done":
                break
            if kind == "ready":
                deadline = time.monotonic() + SECONDS
            else:
                found.append(text)
    except EOFError:  # a reward ended the process; the run's workers survive that, and report it
        return found
    finally:
        if process.pid is not None and process.is_alive():
            end_whole([process.pid])
        process.join()
        end_strays(mark, frozenset())
    return found


def _call_all(answers: Connection, args: RlhfArguments, batch: RewardBatch, mark: str) -> None:
    """In its own process: sends ("ready", "") once rewards can be called, ("fault", text) for each that has one, then
    ("done", "")."""
    try:
        _send_faults(answers, args, batch, mark)
    except Exception:
        # What a reward raises is caught where it is called: this is a defect of ours.
        answers.send(("defect", traceback.format_exc()))
        raise
    answers.send(("done", ""))


def _send_faults(answers: Connection, args: RlhfArguments, batch: RewardBatch, mark: str) -> None:
    with open(os.devnull, "w") as nowhere:  # plugins have printed what they print when they load
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    start_worker(args, args.reward_funcs, partial(load_plugins, args.external_plugins), mark)
    answers.send(("ready", ""))
    unbuilt = faults()
    for fault in unbuilt:
        answers.send(("fault", fault))
    if not unbuilt:
        for name in args.reward_funcs:
            if (cause := _sure_cause(name, batch)) is not None:
                text = f"--reward_funcs {name} fails on every made-up completion (see `swift check`): {cause}"
                answers.send(("fault", text))


def _sure_cause(name: str, batch: RewardBatch) -> str | None:
    """Why no completion gets a value from this reward; None where one does."""
    outcome = _outcome(name, batch, list(range(len(batch.completions))))
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
    return call_reward(name, [item], batch.trainer_state, SECONDS)[0][0]
