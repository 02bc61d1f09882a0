"""The flags of `swift report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from swift_r1.flags.fields import flag
from swift_r1.flags.parser import Command

FORMATS = ("html", "md")


@dataclass(frozen=True, kw_only=True)
class ReportArguments(Command):
    """Report."""

    command: ClassVar[str] = "report"
    runs: list[str] = flag([], "folders of runs, or that hold runs", positional=True, required=True)
    output: str | None = flag(None, "file to write, or folder to write it in; -o for short (default: report-NAME.html)")
    format: str | None = flag(
        None,
        "html: one file with all in it; md: Markdown, with pictures in a folder beside it (default: as --output ends, "
        "else html)",
        choices=FORMATS,
    )
