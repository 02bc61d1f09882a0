"""Commands that are not ours are ms-swift's: run by module, never through its script (that name is ours)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import NoReturn

from swift_r1.errors import UsageError
from swift_r1.launch.start import replace_process

MS_SWIFT_COMMANDS = ("pt", "sft", "infer", "app", "deploy", "export", "sample", "web-ui", "megatron")
MS_SWIFT_RLHF_TYPES = ("dpo", "orpo", "simpo", "kto", "cpo", "rm", "gkd")


def is_for_ms_swift(command: str, words: Sequence[str]) -> bool:
    """Whether ms-swift does this: its own commands, and `rlhf` of a type that is not ours."""
    if command in MS_SWIFT_COMMANDS:
        return True
    return command == "rlhf" and _rlhf_type(words) in MS_SWIFT_RLHF_TYPES


def to_ms_swift(command: str, words: Sequence[str]) -> NoReturn:
    """Replaces this process by ms-swift's command.

    Raises:
        UsageError: ms-swift is not installed (another package of that module name does not count).
    """
    asked = command if command != "rlhf" else f"rlhf --rlhf_type {_rlhf_type(words)}"
    try:
        files = distribution("ms-swift").files or []
    except PackageNotFoundError:
        files = []
    if not any(str(file) == "swift/cli/main.py" for file in files):
        raise UsageError(
            f"`swift {asked}` is done by ms-swift, which is not installed: pip install 'swift-r1[ms-swift]'"
        )
    print(f"swift {command}: handed to ms-swift", file=sys.stderr)
    replace_process("swift.cli.main", (command, *words), os.environ)


def _rlhf_type(words: Sequence[str]) -> str | None:
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("-", "_") == "__rlhf_type":
            return value if equals else next(iter(words[index + 1 :]), None)
    return None
