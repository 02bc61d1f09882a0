"""Runs `swift rlhf` many times without paying for its imports each time: a process that has them forks for each run.

Says `{}` when it is ready, then reads one JSON object a line: `{"words", "cwd", "log", "forget", "processes"}` starts a
run in a process group of its own and is answered with `{"pid"}`; `{"wait": pid}` is answered with `{"code"}` (negative:
the signal that ended it). What runs is the command from its first word on; only where it would become the trainer by
`exec`, it calls it, and forks of it are the other ranks.

`forget` names a part of the saved state that the run is not to get back, or is `finite:<numbers>` of losses to spoil,
or `nothing`, to save a tiny model as a large one, in many buckets.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from swift_r1.arguments.world import World


def main() -> None:
    import deepspeed  # noqa: F401
    import peft.tuners.lora  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, get_scheduler  # noqa: F401

    import swift_r1.checking.quick
    import swift_r1.cli.main
    import swift_r1.cli.rlhf
    import swift_r1.data.loading
    import swift_r1.training.backends.deepspeed
    import swift_r1.training.run  # noqa: F401

    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                _run(**request)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


def _run(words: list[str], cwd: str, log: str, forget: str | None, processes: int) -> NoReturn:
    os.setsid()
    os.chdir(cwd)
    os.environ["NPROC_PER_NODE"] = str(processes)
    with open(os.devnull) as nothing, open(log, "a") as out:
        for target, source in ((0, nothing), (1, out), (2, out)):
            os.dup2(source.fileno(), target)
    code = 1
    try:
        from swift_r1.cli import main as command
        from swift_r1.cli import rlhf
        from swift_r1.tracking import recorder

        rlhf.launch_training = _train
        # Several seconds of matplotlib at the end of every run.
        recorder.draw_curves = lambda log, folder: None
        if forget is not None:
            _forget(forget)
        code = command.main(["rlhf", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(args_json: Path, world: World, environ: Mapping[str, str]) -> NoReturn:
    """This process becomes rank 0, forks of it the others; they end together."""
    from swift_r1.runtime.processes import leave
    from swift_r1.training.worker import main as train

    os.environ.update(environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    os.environ.update(WORLD_SIZE=str(world.size), LOCAL_WORLD_SIZE=str(world.size))
    others = []
    for rank in (*range(1, world.size), 0):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        if rank:
            pid = os.fork()
            if pid == 0:
                leave(train([str(args_json)]))
            others.append(pid)
    code = train([str(args_json)])
    for pid in others if code else ():
        os.kill(pid, signal.SIGKILL)  # as the launcher does
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in others]
    sys.exit(code or max(map(abs, codes), default=0))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _forget(part: str) -> None:
    from swift_r1.training.checkpoint import resume, saving
    from swift_r1.training.checkpoint.state import RunState
    from swift_r1.training.optimizer import LearningRate

    reads: dict[str, Callable[[RunState], RunState]] = {
        "prompts_taken": lambda state: replace(state, prompts_taken=0),
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
    elif part == "learning_rate":
        LearningRate.go_to = lambda self, step: None  # type: ignore[method-assign]
    elif part == "rng":
        resume.rng_of = lambda checkpoint, rank: {}
    elif part == "reference":
        from swift_r1.training.backends.reference import FrozenReference

        FrozenReference.load_weights = lambda self, read: None  # type: ignore[method-assign]
    elif part == "critic_learning_rate":
        _forget_rate_of_the_critic()
    elif part == "critic":
        from swift_r1.training.backends.local import LocalCritic

        LocalCritic.load_training_state = lambda self, read: None  # type: ignore[method-assign]
    elif part == "old_values":
        round_tensors = saving.round_tensors_of
        resume.round_tensors_of = lambda checkpoint: {
            name: tensor * 0 if name.startswith("old_values") else tensor
            for name, tensor in round_tensors(checkpoint).items()
        }
    elif part == "old_logps":
        round_tensors = saving.round_tensors_of
        resume.round_tensors_of = lambda checkpoint: {
            name: tensor for name, tensor in round_tensors(checkpoint).items() if not name.startswith("old_logps")
        }
    else:
        tensor = saving.SavedTensors.__call__

        def worn(self: Any, name: str) -> Any:
            value = tensor(self, name)
            if name.partition(":")[0] != part:
                return value
            return value.bfloat16().float() if part == "master" else value * 0

        saving.SavedTensors.__call__ = worn  # type: ignore[method-assign]


def _forget_rate_of_the_critic() -> None:
    """The second schedule to be brought to its place is the critic's."""
    from swift_r1.training.optimizer import LearningRate

    original, seen = LearningRate.go_to, []

    def go_to(self: LearningRate, step: int) -> None:
        seen.append(step)
        if len(seen) == 1:
            original(self, step)

    LearningRate.go_to = go_to  # type: ignore[method-assign]


def _poison(numbers: set[int]) -> None:
    """The losses of these backward passes are not finite (counted from 1; on one rank alone where there are two)."""
    from swift_r1.training.backends.deepspeed import DeepSpeedBackend
    from swift_r1.training.backends.local import LocalBackend

    seen = 0
    for backend in (LocalBackend, DeepSpeedBackend):

        def backward(self: Any, loss: Any, last: bool, original: Any = backend.backward) -> None:
            nonlocal seen
            seen += 1
            here = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
            original(self, loss * float("inf") * 0 if seen in numbers and here else loss, last)

        backend.backward = backward  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
