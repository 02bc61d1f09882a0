"""`swift merge-lora`: one model out of a model and the adapters that were trained over it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from swift_r1.arguments.merge import MergeArguments
from swift_r1.arguments.parser import parse_arguments
from swift_r1.cli.help import command_help, wants_help
from swift_r1.cli.model_folder import model_faults
from swift_r1.errors import EXIT_OK, RunFailed, UsageError

_USAGE = """swift merge-lora --adapters FOLDER [--model M] [--output_dir D]

Writes a model that needs no adapters: what the rollout server was given in training, number for number."""
_EXAMPLES = """
swift merge-lora --adapters output/model/v0-20261121-120000/checkpoint-100
"""


def run(words: Sequence[str]) -> int:
    """Runs the command.

    Raises:
        UsageError: the folder holds no adapters, their model is not there, or something is in the way.
        RunFailed: the merged model cannot be written.
    """
    if wants_help(words):
        print(command_help(MergeArguments, _USAGE, _EXAMPLES))
        return EXIT_OK
    args = parse_arguments(MergeArguments, words)
    adapters, output = Path(args.adapters).expanduser(), Path(str(args.output_dir)).expanduser()
    base = args.model or _base_of(adapters)
    faults = model_faults(base, os.environ)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        faults.append(f"--output_dir {output} exists and is not empty")
    if faults:
        raise UsageError(*faults)
    from swift_r1.training.merging import merge

    try:
        merge(base, adapters, output, args.torch_dtype)
    except OSError as error:
        raise RunFailed(f"{output}: {error.strerror or error}") from error
    print(f"merged model: {output}")
    return EXIT_OK


def _base_of(adapters: Path) -> str:
    """The model that the adapters were trained over.

    Raises:
        UsageError: they are none, or do not say.
    """
    config = adapters / "adapter_config.json"
    if not config.is_file() or not (adapters / "adapter_model.safetensors").is_file():
        raise UsageError(
            f"--adapters {adapters} holds no adapters (adapter_config.json and adapter_model.safetensors): give a "
            "checkpoint of --train_type lora or qlora"
        )
    base = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise UsageError(f"--adapters {adapters} does not say which model is under it: give --model")
    return str(base)
