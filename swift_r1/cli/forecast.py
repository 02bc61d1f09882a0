"""`swift forecast`: tries the beginning of a run, and says what it would have to learn from."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swift_r1.cli.files import json_file, write_json
from swift_r1.cli.memory import room
from swift_r1.cli.rlhf import prepared
from swift_r1.errors import EXIT_OK
from swift_r1.flags.forecast import FORECAST_FILE, ForecastArguments, TriedArguments, arguments_of
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.plan import Plan
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.world import World
from swift_r1.launch.environment import has_gpu, trainer
from swift_r1.record.recorded import IMAGES
from swift_r1.runtime.hardware import gpu_memory
from swift_r1.runtime.processes import module_words
from swift_r1.workers.process import SupervisedProcess

_USAGE = """swift forecast [config.yaml] --rlhf_type grpo|ppo --model M --dataset D --reward_funcs R [--flag value ...]

Takes the flags of a `swift rlhf` command. The model answers the run's first prompts with the run's engine (a server, an
engine beside the trainer, or the trainer itself), the run's rewards score the answers, and two optimizer steps follow.
Then tables say how many groups have a signal (rewards that differ), what passes, what is cut off and what a step costs,
with a verdict and what to change. Nothing is kept. Exit code 0 whatever the verdict."""
_EXAMPLES = """
swift forecast --rlhf_type grpo --model models/smollm2-135m --external_plugins plugins/countdown.py \\
  --dataset 'countdown#1000' --reward_funcs external_countdown format --per_device_train_batch_size 8
swift forecast grpo.yaml --num_prompts 64 --num_completions 32 --json forecast.json
"""
HELP = (_USAGE, ForecastArguments, _EXAMPLES, ("Forecast",))
_END_S = 30.0  # for a trainer that was told to end


def run(words: Sequence[str]) -> int:
    """Runs the command. Raises as `swift rlhf`'s; returns the trainer's exit code where it failed."""
    parsed = parse_arguments(ForecastArguments, words)
    file = json_file(parsed.json)
    return tried(parsed, words, lambda folder, world: _say(folder, file, world))


def tried(parsed: TriedArguments, words: Sequence[str], tell: Callable[[Path, World], int]) -> int:
    """Runs a trainer in a folder that goes, and has `tell` read what it has left there; returns what that returns, or
    the trainer's exit code where it failed. Raises as `swift rlhf`'s."""
    os.environ.update(parsed.process_variables)
    world, _ = World.from_environment(os.environ)
    with TemporaryDirectory(
        prefix=f"swift-{parsed.command}-", ignore_cleanup_errors=True
    ) as folder:
        args_json, environ = prepared(replace(parsed, output_dir=folder), words, world)
        return _run_trainer(args_json, world, environ) or tell(Path(folder), world)


def _run_trainer(args_json: Path, world: World, environ: Mapping[str, str]) -> int:
    """Runs the trainer, which ends with this process; returns its exit code."""
    module, environ = trainer(world, environ)
    words = [sys.executable, *module_words(module, str(args_json))]
    # Ctrl-C is for it too
    process = SupervisedProcess(
        words, environ, ends_with_parent=True, stdin=None, start_new_session=False
    )
    try:
        return process.wait()
    finally:
        process.end(_END_S)


def _say(folder: Path, file: Path | None, world: World) -> int:
    from swift_r1.lab.diagnosis.warm_start import warm_start
    from swift_r1.lab.forecast.outlook import outlook
    from swift_r1.lab.forecast.show import show, to_json
    from swift_r1.lab.forecast.verdict import verdict
    from swift_r1.record.metrics import read_json_lines
    from swift_r1.runtime.terminal import Terminal

    content = _read(folder / "args.json")
    rehearsal = _read(folder / FORECAST_FILE)
    args = arguments_of(content)
    rows = read_json_lines(folder / "completions.jsonl")
    seen = outlook(rows, rehearsal, args, Plan(**content["plan"]))
    command, flags, plan = content["command"], content["args"], content["plan"]
    commands = warm_start(command, flags, plan, seen.cost.answer)
    judged = verdict(seen, args, commands, plan["answered"])
    images = any(IMAGES in row for row in rows)
    memory = _memory(args, world, seen.cost.peak_gib, images)
    show(seen, judged, memory, Terminal(width=max(100, Terminal().width)))
    if file is not None:
        write_json(file, to_json(seen, judged, memory))
    return EXIT_OK


def _memory(args: RlhfArguments, world: World, peak_gib: float | None, images: bool) -> str:
    """Returns what was held, what a rank may need at most (but what a tower computes of `images`), and whether that
    fits."""
    from swift_r1.models.shape import shape_of
    from swift_r1.training.memory import GIB, card_of, estimated

    gpu = has_gpu(os.environ)
    memory = gpu_memory(os.environ, world.nproc_per_node) if gpu else None
    most = estimated(args, shape_of(args.model, images), world, card_of(gpu, memory))
    held = "" if peak_gib is None else f"{peak_gib:.2f} GiB were held; "
    bound = f"at most {most.peak / GIB:.2f} GiB with prompts of {most.prompt_tokens} tokens and the longest completions"
    return f"{held}{bound}; {room(most.peak, world, gpu, memory)}"


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
