"""The flags of `swift init`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from swift_r1.flags.fields import flag
from swift_r1.flags.parser import Command

TASKS = {
    "maths": "answers with a right number",
    "format": "answers in a given form",
    "code": "programs that pass tests",
    "judge": "texts that another model judges",
    "agent": "conversations with a program, which it asks for what it needs",
}


@dataclass(frozen=True, kw_only=True)
class InitArguments(Command):
    """Init."""

    command: ClassVar[str] = "init"
    folder: list[str] = flag([], "the folder to make", positional=True)
    task: str | None = flag(None, "what the model is to learn", choices=tuple(TASKS))
    model: str | None = flag(None, "folder or hub id of the model")
