"""The flags of `swift why`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from swift_r1.flags.fields import flag
from swift_r1.flags.parser import Command


@dataclass(frozen=True, kw_only=True)
class WhyArguments(Command):
    """Why."""

    command: ClassVar[str] = "why"
    runs: list[str] = flag([], "folders of runs, or that hold runs", positional=True, required=True)
    json: bool = flag(False, "print a JSON list, an object for each run")
