"""Called in a run's process before it begins: a part of the saved state is forgotten, or a loss spoiled."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def _prompts(state: Any, **other: Any) -> Any:
    """Returns the state with something else of the prompts of each task."""
    prompts = {name: replace(one, **other) for name, one in state.prompts.items()}
    return replace(state, prompts=prompts)


def forget(part: str) -> None:
    """`part` names a part of the saved state that the run is not to get back, or is `finite:<numbers>` of losses to
    spoil, or `nothing`, to save a tiny model as a large one, in many buckets, or `evaluation:<step>` of an
    evaluation in which SIGTERM comes."""
    from swift_r1.training import open_round
    from swift_r1.training.checkpoint import resume, saving
    from swift_r1.training.checkpoint.state import RunState
    from swift_r1.training.optimizer import LearningRate

    reads: dict[str, Callable[[RunState], RunState]] = {
        "prompts_taken": lambda state: _prompts(state, taken=0),
        "rounds": lambda state: replace(state, rounds=state.rounds - 1),
        "weight_version": lambda state: replace(state, weight_version=0),
        "window": lambda state: replace(state, window={}),
        "run_id": lambda state: replace(state, run_id="other"),
    }
    if part in reads:
        original = RunState.read
        RunState.read = classmethod(lambda cls, path: reads[part](original(path)))  # type: ignore[method-assign]
    elif part == "nothing":
        from swift_r1.training.backends import optimizer_state
        from swift_r1.training.checkpoint import tensors

        tensors.BUCKET_BYTES = 20_000
        optimizer_state._BUCKET_NUMBERS = 5_000
    elif part.startswith("finite:"):
        _poison({int(number) for number in part.removeprefix("finite:").split(",")})
    elif part.startswith("evaluation:"):
        _signal_in_evaluation(int(part.removeprefix("evaluation:")))
    elif part == "learning_rate":
        LearningRate.go_to = lambda self, step: None  # type: ignore[method-assign]
    elif part == "rng":
        resume.rng_of = lambda checkpoint, rank: {}
    elif part == "reference":
        from swift_r1.training.backends.base import FrozenReference

        FrozenReference.load_weights = lambda self, read: None  # type: ignore[method-assign]
    elif part == "old_logps":
        round_tensors = open_round.round_tensors_of
        open_round.round_tensors_of = lambda checkpoint: {
            name: tensor
            for name, tensor in round_tensors(checkpoint).items()
            if not name.startswith(part)
        }
    else:
        tensor = saving.SavedTensors.__call__

        def worn(self: Any, name: str, *more: Any) -> Any:
            value = tensor(self, name, *more)
            if name.partition(":")[0] != part:
                return value
            return value.bfloat16().float() if part == "master" else value * 0

        saving.SavedTensors.__call__ = worn  # type: ignore[method-assign]


def _poison(numbers: set[int]) -> None:
    """The losses of these backward passes are not finite (counted from 1; on one rank alone where there are two)."""
    from swift_r1.models.policy import Policy
    from swift_r1.training.backends.deepspeed import DeepSpeedBackend
    from swift_r1.training.backends.local import LocalBackend

    seen = 0
    for backend in (LocalBackend, DeepSpeedBackend):

        def backward(self: Any, loss: Any, last: bool, original: Any = backend.backward) -> None:
            nonlocal seen
            seen += isinstance(self.module, Policy)
            here = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
            original(
                self,
                loss * float("inf") * 0
                if isinstance(self.module, Policy) and seen in numbers and here
                else loss,
                last,
            )

        backend.backward = backward  # type: ignore[method-assign]


def _signal_in_evaluation(wanted: int) -> None:
    from swift_r1.training.evaluation.evaluate import Evaluator

    original = Evaluator.run

    def run(self: Evaluator, step: int, unwanted: Callable[[], bool]) -> Any:
        if step == wanted:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 60
            while not unwanted() and time.monotonic() < deadline:
                time.sleep(0.01)
        return original(self, step, unwanted)

    Evaluator.run = run  # type: ignore[method-assign]
