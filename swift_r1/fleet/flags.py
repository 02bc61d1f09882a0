"""The flags of `swift launch` itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from swift_r1.flags.fields import resumable_flag
from swift_r1.flags.parser import Command
from swift_r1.fleet.backends import BACKENDS


@dataclass(frozen=True, kw_only=True)
class LaunchArguments(Command):
    """Launch."""

    command: ClassVar[str] = "launch"
    of_others: ClassVar[str] = "put it into the file"
    on: str = resumable_flag("local", "what the nodes are", choices=tuple(BACKENDS))
    dry_run: bool = resumable_flag(
        False, "print every command with its node and its variables, and start none"
    )
    max_restarts: int = resumable_flag(
        3,
        "how often training restarts from its last checkpoint, and how often in a row a server that does not get ready "
        "comes back, or a Slurm job that has gained no step is queued again",
        at_least=0,
    )
    node_timeout: float = resumable_flag(
        600.0,
        "seconds without the nodes that training needs, or without a place for any server of a role, after which the "
        "launch ends",
        more_than=0,
    )
    silence_timeout: float = resumable_flag(
        60.0,
        "seconds without a word after which a node counts as gone, and ends what runs on it",
        more_than=5,
    )
