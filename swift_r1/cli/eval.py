"""`swift eval`: checks the flags and evaluates, or compares two evaluations."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from swift_r1.errors import EXIT_OK, RunFailed, UsageError
from swift_r1.flags.adapters import adapters_base
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.flags.parser import parse_arguments
from swift_r1.launch.checks.model_folder import dtype_here, model_faults
from swift_r1.launch.environment import has_gpu
from swift_r1.launch.run_folder import without_secrets
from swift_r1.runtime.processes import say

_USAGE = """swift eval --model M --benchmarks B ... [config.yaml] [--flag value ...]
swift eval --compare RUN_A RUN_B

Measures a model folder or a checkpoint, which it serves with `swift rollout`, or a server that runs, on benchmarks: a
table, report.json, and every completion in completions.jsonl as it comes. If it is killed, the same command continues."""
_EXAMPLES = """
swift eval --model Qwen/Qwen2.5-Math-1.5B-Instruct --benchmarks gsm8k math500 aime24 amc23 minerva olympiad_bench --n 16
swift eval --model output/run/v0-.../checkpoint-100 --benchmarks math500 --temperature 0
swift eval --model http://127.0.0.1:8000 --benchmarks gsm8k=data/gsm8k_test.jsonl --n 4
swift eval --compare output/eval/base output/eval/checkpoint-100
"""
HELP = (_USAGE, EvalArguments, _EXAMPLES)


def run(words: Sequence[str]) -> int:
    """Raises UsageError: bad flags, model folder, or folders to compare; SwiftError: the evaluation failed."""
    args = parse_arguments(EvalArguments, words)
    if args.compare:
        return _compare(args)
    if not args.is_url:
        base = adapters_base(args.model)
        where = "" if base is None else f"--model {args.model} holds adapters of {base}: "
        faults = model_faults(base or args.model, os.environ)
        if faults:
            raise UsageError(*(f"{where}{fault}" for fault in faults))
        dtype, about_dtype = dtype_here(base or args.model, args.torch_dtype, has_gpu(os.environ))
        if about_dtype is not None:
            say(about_dtype, "eval")
        args = replace(args, torch_dtype=dtype)
    from swift_r1.lab.evaluation.run import run as evaluate

    try:
        return evaluate(args, ["swift", "eval", *without_secrets(words)])
    except OSError as error:  # a write that fails names no file
        place = error.filename or args.output_dir
        raise RunFailed(f"{error.strerror or error}: {place}") from error


def _compare(args: EvalArguments) -> int:
    from swift_r1.lab.evaluation.report import compare, comparison_json, comparison_table
    from swift_r1.lab.evaluation.store import write_whole
    from swift_r1.runtime.terminal import Terminal

    first, second = map(Path, args.compare)
    compared = compare(first, second, args.seed)
    if args.output_dir is not None:
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        content = comparison_json(first, second, args.seed, compared)
        write_whole(folder / "compare.json", json.dumps(content, indent=2) + "\n")
    Terminal().print(comparison_table(first, second, compared))
    return EXIT_OK
