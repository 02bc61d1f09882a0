"""`swift forecast`: tries the beginning of a run, and says what it would have to learn from."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from swift_r1.cli.rlhf import prepared
from swift_r1.flags.forecast import SAMPLED, ForecastArguments, arguments_of
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.plan import Plan
from swift_r1.flags.world import World
from swift_r1.launch.environment import trainer
from swift_r1.runtime.processes import module_words
from swift_r1.workers.process import SupervisedProcess

_USAGE = """swift forecast [config.yaml] --rlhf_type grpo|ppo --model M --dataset D --reward_funcs R [--flag value ...]

Takes the flags of a `swift rlhf` command. The model answers the run's first prompts with the run's engine (a server, an
engine beside the trainer, or the trainer itself), the run's rewards score the answers, and two optimizer steps follow.
Then a table says what passes, how many groups have a signal (rewards that differ), what is cut off and what a step costs.

With --output_file the best or right answers are kept as rows with `messages` and the columns of the data: `swift sft
--dataset FILE` learns them (rejection sampling). Answers that were cut at --max_completion_length are not. See
docs/forecast.md."""
_EXAMPLES = """
swift forecast --rlhf_type grpo --model models/smollm2-135m --external_plugins plugins/countdown.py \\
  --dataset 'countdown#1000' --reward_funcs external_countdown format --per_device_train_batch_size 8
swift forecast grpo.yaml --num_prompts 0 --n_best_to_keep 2 --output_file right.jsonl
"""
HELP = (_USAGE, ForecastArguments, _EXAMPLES, ("Forecast",))
_END_S = 30.0  # for a trainer that was told to end


def run(words: Sequence[str]) -> int:
    """Runs the command. Raises as `swift rlhf`'s; returns the trainer's exit code."""
    parsed = parse_arguments(ForecastArguments, words)
    os.environ.update(parsed.process_variables)
    world, _ = World.from_environment(os.environ)
    with TemporaryDirectory(prefix="swift-forecast-", ignore_cleanup_errors=True) as folder:
        args_json, environ = prepared(replace(parsed, output_dir=folder), words, world)
        code = _run_trainer(args_json, world, environ)
        if (Path(folder) / SAMPLED).is_file():  # also where its steps failed
            _show(Path(folder))
    return code


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


def _show(folder: Path) -> None:
    """Prints the forecast, and where nothing earns anything the commands of a warm start."""
    from rich import box
    from rich.table import Table

    from swift_r1.lab.diagnosis.causes import WARM_START
    from swift_r1.lab.diagnosis.warm_start import warm_start
    from swift_r1.lab.forecast import earns_nothing, lines, step_lines
    from swift_r1.record.metrics import read_json_lines
    from swift_r1.runtime.terminal import Terminal

    content = json.loads((folder / "args.json").read_text(encoding="utf-8"))
    args = arguments_of(content)
    plan = Plan(**content["plan"])
    rows = read_json_lines(folder / SAMPLED)
    steps = read_json_lines(folder / "logging.jsonl")
    last = steps[-1] if steps else None
    table = Table(title="Forecast", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("what", "value", "95 % interval, or a note"):
        table.add_column(name)
    for line in lines(rows, args, plan):
        table.add_row(*line)
    if last is not None:
        for line in step_lines(last, plan):
            table.add_row(*line)
    Terminal(width=max(100, Terminal().width)).print(table)
    if earns_nothing(rows, args):
        times = [last.get(f"time/{name}", 0.0) for name in ("generate", "reward")] if last else []
        answer = sum(times) / plan.completions_per_optimizer_step if times else math.nan
        print(f"next to nothing earns a reward: {WARM_START}")
        for command in warm_start(content["command"], content["args"], content["plan"], answer):
            print(f"  $ {command}")
