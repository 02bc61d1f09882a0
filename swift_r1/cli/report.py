"""`swift report`: one file about runs, to send or to post. Writes nothing in their folders unless told to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from swift_r1.cli.files import naming
from swift_r1.cli.view import check_packages
from swift_r1.errors import EXIT_OK, UsageError
from swift_r1.flags.fields import flag
from swift_r1.flags.parser import Command, parse_arguments
from swift_r1.record.folder import RunFolder, find_runs
from swift_r1.runtime.processes import say
from swift_r1.runtime.visible import visible

_USAGE = """swift report RUN ... [-o report.html|report.md]

Writes one self-contained file: what was run, curves, evaluations compared, the same prompts over time, failures,
completions and cost. RUN is the folder of a run, or one that holds runs; runs that differ only in their seed are drawn
as one curve with a band. The same folders give the same file, byte for byte."""
_EXAMPLES = """
swift report output/model/v0-20261121-120000
swift report output/baseline output/longer -o comparison.html
swift report output/model/v0-20261121-120000 -o docs/run.md
"""

FORMATS = ("html", "md")


@dataclass(frozen=True, kw_only=True)
class ReportArguments(Command):
    """Report."""

    command: ClassVar[str] = "report"
    runs: list[str] = flag([], "folders of runs, or that hold runs", positional=True, required=True)
    output: str | None = flag(
        None,
        "file to write, or folder to write it in; -o for short (default: report-NAME.html). One that ends in .md is "
        "Markdown, with its pictures in a folder beside it",
    )


HELP = (_USAGE, ReportArguments, _EXAMPLES)
_MARK = b"<!-- swift report -->"  # in the first bytes of every report


def run(words: Sequence[str]) -> int:
    """Runs the command. Raises UsageError: bad flags or folders, a file that cannot be written or is no report, or the
    extra is not installed."""
    args = parse_arguments(
        ReportArguments, ["--output" if word == "-o" else word for word in words]
    )
    check_packages()
    folders = find_runs(args.runs)
    if args.output is None and any(Path.cwd().is_relative_to(folder.path) for folder in folders):
        raise UsageError("this folder is a run's own: name a file with -o")
    file = Path(args.output or ".").expanduser()
    form = "" if file.is_dir() else file.suffix.lstrip(".")
    form = form or FORMATS[0]
    if form not in FORMATS:
        raise UsageError(f"--output {args.output} ends in .{form}: give .html or .md")
    if file.is_dir():
        more = f"-and-{len(folders) - 1}-more" if len(folders) > 1 else ""
        file /= "report-" + re.sub(r"[^\w.-]+", "-", folders[0].name) + f"{more}.{form}"
    for problem in write_report(folders, file, form):
        say(problem, "report")
    print(visible(str(file)))
    return EXIT_OK


def write_report(folders: Sequence[RunFolder], file: Path, form: str) -> Sequence[str]:
    """Writes the report of these runs to `file`; returns what could not be read, a line each. Raises UsageError: it
    cannot be written, or is there and is no report."""
    _check(file)
    from swift_r1.lab.report.build import build

    report = build(folders)
    if form == "md":
        from swift_r1.lab.report.markdown import markdown

        pictures = file.with_name(f"{file.stem}_files")
        text, figures = markdown(report, pictures.name)
        _write({pictures / name: svg for name, svg in figures.items()} | {file: text})
    else:
        from swift_r1.lab.report.html import html

        _write({file: html(report)})
    return report.problems


def _check(file: Path) -> None:
    """Raises UsageError where the file cannot be written, or is there and is no report."""
    if not file.parent.is_dir():
        raise UsageError(f"{file}: there is no folder {file.parent}")
    with naming(str(file)), suppress(FileNotFoundError), file.open("rb") as there:
        if _MARK not in there.read(500):
            raise UsageError(f"{file} exists and is not a report: name another file with -o")


def _write(files: Mapping[Path, str]) -> None:
    """Writes each file whole or not at all, the last one last. Raises UsageError where one cannot be written."""
    from swift_r1.lab.evaluation.store import write_whole

    for file, text in files.items():
        with naming(f"{file} cannot be written"):
            file.parent.mkdir(exist_ok=True)
            write_whole(file, text)
