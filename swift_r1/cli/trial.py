"""`swift why RUN --try true`: the flags that its advice means, or those given, on the run's own tokens."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from swift_r1.cli.replay import ReplaySpan, span_of, why_not_replayed
from swift_r1.errors import EXIT_USAGE, RunFailed, UsageError
from swift_r1.flags.batch import processes_of
from swift_r1.flags.fields import as_words, from_words, shown_value, spellings
from swift_r1.flags.parser import flags_with_values, spelling, unknown_flag
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.lab.diagnosis.past import Past
from swift_r1.lab.diagnosis.proof import ComparedMetric, compared, new_command, told
from swift_r1.record.folder import RunFolder, is_run
from swift_r1.record.metric_log import MetricLog
from swift_r1.record.recorded import RecordedRun
from swift_r1.runtime.processes import module_words, say
from swift_r1.workers.process import SupervisedProcess

if TYPE_CHECKING:
    from swift_r1.lab.diagnosis.verdict import Verdict

_START = "resume_from_checkpoint"  # where both replays begin, no change
_QUIET: Mapping[str, Any] = {
    "add_version": False,
    "save_strategy": "no",
    "create_checkpoint_symlink": False,
    "log_tokens": "none",
    "log_completions": False,
    "logging_steps": 1,
    "report_to": "none",
}
_LOOK_S = 0.2
_END_S = 30.0  # for a replay that was told to end
_ONLY_NEW = "the rewards of a replay are the recorded ones: whether the reward rises only a new run can show"


@dataclass(frozen=True, slots=True)
class AdviceTrial:
    """What was tried for a run. `rows` is empty where none of `flags` could be replayed."""

    cause: str | None  # that the flags are to help against; None where the user has given them
    flags: Mapping[str, Any]
    left_out: Mapping[str, str]  # of those, why they were not replayed
    rounds: int
    rows: Sequence[ComparedMetric]
    shows: Sequence[str]
    command: str  # of a new run


def try_flags(
    folder: RunFolder, verdict: Verdict | None, words: Sequence[str], rounds: int, into: str | None
) -> AdviceTrial:
    """Replays a run's first rounds with other flags and with its own, and compares the two.

    Args:
        words: flags of `swift rlhf`; without any that changes something, those of the first cause that has some.
        into: folder for both replays; None: one that is removed.

    Raises:
        UsageError: there is nothing to try, the flags are wrong, or the record has too little.
        RunFailed: a replay failed.
    """
    given = _given(words)
    start = {name: given.pop(name) for name in (_START,) if name in given}
    cause, flags = (None, given) if given else _advice(verdict)
    # what a replay advises after the colon is not for here
    whys = {name: why_not_replayed(name) for name in flags}
    left_out = {
        name: f"it {why.partition(':')[0]}" for name, why in whys.items() if why is not None
    }
    changes = {name: value for name, value in flags.items() if name not in left_out}
    recorded = RecordedRun.open(folder.path)
    command = new_command(recorded.content, flags, processes_of(recorded.args))
    if not changes:
        return AdviceTrial(cause, flags, left_out, 0, (), (), command)
    sides = [start, start | changes]
    spans = [span_of(recorded, as_words(sides[0]), rounds)]
    try:
        spans.append(span_of(recorded, as_words(sides[1]), rounds))
    except UsageError as error:
        if cause is None:
            raise
        left_out |= dict.fromkeys(changes, error.faults[0])
        return AdviceTrial(cause, flags, left_out, 0, (), (), command)
    with ExitStack() as cleanup:
        base = Path(into) if into is not None else None
        if base is None:
            name = cleanup.enter_context(
                TemporaryDirectory(prefix="swift-why-", ignore_cleanup_errors=True)
            )
            base = Path(name)
        pasts = _replayed(folder.path, sides, spans, base)
    whole = min((span.end - span.begin) // span.per_round for span in spans)
    before, after = pasts
    rows = compared(before, after, spans[0].begin, whole)
    shows = [*told(rows, whole, cause), _ONLY_NEW]
    return AdviceTrial(cause, flags, left_out, whole, rows, shows, command)


def _given(words: Sequence[str]) -> dict[str, Any]:
    """Returns the values of the flags on a command line. Raises UsageError: one is unknown, or its value is wrong."""
    known = spellings(RlhfArguments)
    faults: list[str] = []
    values = {}
    for written, own in flags_with_values(RlhfArguments, words, faults):
        spec = known.get(spelling(written))
        if spec is None:
            faults.append(unknown_flag(RlhfArguments, written))
        elif spec.name == "max_steps":
            faults.append("--max_steps: --rounds says how far the replays go")
        else:
            try:
                values[spec.name] = from_words(spec, own)
            except ValueError as error:
                faults.append(f"{written} {error}")
    if faults:
        raise UsageError(*faults)
    return values


def _advice(verdict: Verdict | None) -> tuple[str, Mapping[str, Any]]:
    """Returns the first cause that has flags, and these. Raises UsageError where there is none."""
    causes = verdict.causes if verdict is not None else ()
    for cause in causes:
        if cause.flags:
            return cause.name, cause.flags
    names = ", ".join(cause.name for cause in causes)
    why = f"of its causes ({names}) none has a flag" if names else "no cause was found"
    raise UsageError(f"--try: {why}: give the flags to try, such as --learning_rate 1e-6")


def _replayed(
    run: Path, sides: Sequence[Mapping[str, Any]], spans: Sequence[ReplaySpan], base: Path
) -> list[Past]:
    """Replays a run with each of the flags up to the end of its span, and returns what that has logged. Raises
    UsageError, RunFailed: a replay failed."""
    from swift_r1.record.console import progress_bar
    from swift_r1.runtime.terminal import Terminal

    folders = [base / name for name in ("as-it-was", "changed")]
    for folder in folders:
        if is_run(folder):
            raise UsageError(f"--output_dir: there is a run in {folder} already")
        folder.mkdir(parents=True, exist_ok=True)
    logs = [MetricLog(folder) for folder in folders]
    with progress_bar(Terminal(stderr=True)) as bar:
        steps = bar.add_task("replays", total=sum(span.end - span.begin for span in spans))
        before = 0
        for side, span, folder, log in zip(sides, spans, folders, logs, strict=True):
            flags = {**side, **_QUIET, "output_dir": str(folder), "max_steps": span.end}
            words = [
                sys.executable,
                *module_words("swift_r1", "replay", str(run), *as_words(flags)),
            ]
            if not bar.console.is_terminal:
                say(f"replaying {span.end - span.begin} steps into {folder}", "why")
            process = SupervisedProcess(
                words, os.environ, folder / "output.log", ends_with_parent=True
            )
            try:
                while process.look() is None:
                    log.refresh()
                    bar.update(steps, completed=before + max(0, log.last_step - span.begin))
                    time.sleep(_LOOK_S)
            finally:
                process.end(_END_S)
            log.refresh()
            before += span.end - span.begin
            if process.returncode:
                kind = UsageError if process.returncode == EXIT_USAGE else RunFailed
                raise kind(f"the replay failed: {process.last_line()}")
    opened = [RunFolder(folder, folder.name) for folder in folders]
    return [Past.of(log, one) for log, one in zip(logs, opened, strict=True)]


def show(trial: AdviceTrial) -> None:
    """Prints what was tried, both replays beside each other, what that shows, and the command of a new run."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from swift_r1.runtime.terminal import Terminal

    console = Terminal(width=max(100, Terminal().width))
    words = " ".join(f"--{name} {shown_value(value)}" for name, value in trial.flags.items())
    against = "" if trial.cause is None else f" against {trial.cause!r}"
    lines = [f"tried{against}: {words}" if trial.rows else f"to try{against}: {words}"]
    lines += [f"--{name} was not replayed: {why}" for name, why in trial.left_out.items()]
    if trial.rows:
        ends = sorted({1, trial.rounds})
        table = Table(box=box.SIMPLE, pad_edge=False)
        table.add_column("")
        for side in ("as it was", "changed"):
            for number in ends:
                table.add_column(f"{side}, round {number}", justify="right")
        table.add_column("what it is")
        for row in trial.rows:
            cells = [_number(side[end - 1]) for side in (row.before, row.after) for end in ends]
            table.add_row(*map(Text, (row.name, *cells, row.meaning)))
        console.print(Text("\n".join(lines)), soft_wrap=True)
        console.print(table)
        lines = [f"- {line}" for line in trial.shows]
    lines += ["a new run:", f"  {trial.command}"]
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.3g}" if abs(value) >= 1e-8 else "0"  # what rounding leaves
