"""`swift why`: whether runs learn, and what keeps them from it, from what they have logged. Writes nothing in their
folders."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from swift_r1.errors import EXIT_FINDING, EXIT_OK
from swift_r1.flags.fields import flag
from swift_r1.flags.parser import Command, parse_arguments
from swift_r1.lab.diagnosis.causes import WARM_START
from swift_r1.lab.diagnosis.past import DETECTORS
from swift_r1.lab.diagnosis.verdict import headline
from swift_r1.lab.diagnosis.warm_start import warm_start
from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.record.folder import find_runs
from swift_r1.record.metrics import standard_json
from swift_r1.runtime.visible import visible

if TYPE_CHECKING:
    from swift_r1.lab.diagnosis.verdict import Verdict
    from swift_r1.record.folder import RunFolder

_USAGE = """swift why RUN ... [--json]

Says whether the reward of a run rises, by how much, and if not, why not: what keeps it from rising, on what
evidence, and what to try. Then come the signs of trouble that the run has reported while it trained
(diagnosis.jsonl). RUN is the folder of a run, or one that holds runs: still training, ended, or killed.
docs/diagnosis.md lists what it looks for. Exit code 0 if nothing is found, 6 if something is."""
_EXAMPLES = """
swift why output/model/v0-20261121-120000
swift why output --json
"""


@dataclass(frozen=True, kw_only=True)
class WhyArguments(Command):
    """Why."""

    command: ClassVar[str] = "why"
    runs: list[str] = flag([], "folders of runs, or that hold runs", positional=True, required=True)
    json: bool = flag(False, "print a JSON list, an object for each run")


HELP = (_USAGE, WhyArguments, _EXAMPLES)


def run(words: Sequence[str]) -> int:
    """Runs the command. Raises UsageError: bad flags or folders."""
    args = parse_arguments(WhyArguments, words)
    reports = []
    any_findings = False
    for folder in find_runs(args.runs):
        log = Diagnosis(folder.path)
        log.refresh()
        verdict = log.verdict
        causes = verdict.causes if verdict is not None else ()
        any_findings |= bool(log.findings) or any(cause.fault for cause in causes)
        if args.json:
            reports.append(_report(folder, log, verdict))
            continue
        why = f": {_failure(folder)}" if folder.status == "failed" else ""
        lines = [
            f"{folder.name}: {folder.status} at step {log.last_step}{why}",
            *_lines(folder, log, verdict),
        ]
        print(visible("\n".join(lines)))
        for problem in (*folder.problems, *log.problems):
            print(visible(f"swift why: {folder.name}: {problem}"), file=sys.stderr)

    if args.json:
        print(json.dumps(standard_json(reports), indent=2))
    return EXIT_FINDING if any_findings else EXIT_OK


def _report(folder: RunFolder, log: Diagnosis, verdict: Verdict | None) -> dict[str, Any]:
    return {
        "run": str(folder.path),
        "status": folder.status,
        "steps": log.last_step,
        "failed": _failure(folder),
        "verdict": verdict.to_json() if verdict is not None else None,
        "findings": [asdict(finding) for finding in log.findings.values()],
        "not_judged": log.not_judged,
        "too_early": log.too_early,
        "problems": [*folder.problems, *log.problems],
    }


def _failure(folder: RunFolder) -> str | None:
    """Returns what ended the run last; None where nothing failed."""
    failures = [str(event.get("text")) for event in folder.events if event.get("kind") == "failed"]
    return failures[-1] if failures else None


def _lines(folder: RunFolder, log: Diagnosis, verdict: Verdict | None) -> Iterator[str]:
    """Yields the verdict, its causes, the signs beside them, and what could not be looked at."""
    yield f"  {headline(verdict, log.past)}"
    if verdict is not None:
        for trend in verdict.trends:
            yield f"    {trend.text}"
        for number, cause in enumerate(verdict.causes, start=1):
            yield f"  {number}. {cause.name}: {cause.evidence}"
            yield f"     try: {cause.advice}"
            if WARM_START in cause.advice:
                seconds = log.past.answer_seconds
                commands = warm_start(folder.command, folder.args, folder.plan, seconds)
                yield from (f"     $ {line}" for line in commands)
    explained = {cause.evidence for cause in verdict.causes} if verdict is not None else set()
    for finding in log.findings.values():
        if finding.evidence in explained:
            continue  # it is a cause already
        first, last = finding.steps
        yield f"  sign: {finding.name}, steps {first} to {last}: {finding.evidence}"
        yield f"    try: {finding.advice}"
    looked = len(DETECTORS) - len(log.not_judged) - len(log.too_early)
    yield f"  {len(log.findings)} of {looked} signs of trouble hold (of {len(DETECTORS)} that there are)"
    if log.too_early:
        yield f"  not looked for, too early after {log.rounds} rounds: {', '.join(log.too_early)}"
    if log.not_judged and log.rewards():
        yield f"  not looked for, metrics missing: {', '.join(log.not_judged)}"
