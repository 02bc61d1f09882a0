"""`swift merge-lora`: one model out of a model and the adapters that were trained over it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_r1.arguments.merge import MergeArguments
from swift_r1.arguments.parser import parse_arguments
from swift_r1.cli.adapters import base_of
from swift_r1.cli.help import command_help, wants_help
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
    base = base_of(adapters, args.model)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output_dir {output} exists and is not empty")
    from swift_r1.models.merging import merge

    try:
        merge(base, adapters, output, args.torch_dtype)
    except OSError as error:
        raise RunFailed(f"{output}: {error.strerror or error}") from error
    print(f"merged model: {output}")
    return EXIT_OK
