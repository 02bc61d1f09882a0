"""`swift why`: what is wrong with runs, from what they have logged. Writes nothing in their folders."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from swift_r1.errors import EXIT_OK, EXIT_RUN_FAILED
from swift_r1.flags.fields import flag
from swift_r1.flags.parser import Command, parse_arguments
from swift_r1.runtime.visible import visible

_USAGE = """swift why RUN ... [--json]

Says what is wrong with runs, on what evidence, and what to try, as a run says of itself while it trains
(diagnosis.jsonl). RUN is the folder of a run, or one that holds runs: still training, ended, or killed.
docs/diagnosis.md lists what it looks for. Exit code 0 if nothing is found, 5 if something is."""
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
    from swift_r1.lab.diagnosis.past import DETECTORS
    from swift_r1.lab.diagnosis.watch import Diagnosis
    from swift_r1.record.folder import find_runs

    reports = []
    any_findings = False
    for folder in find_runs(args.runs):
        log = Diagnosis(folder.path)
        log.refresh()
        findings = list(log.findings.values())
        any_findings |= bool(findings)
        problems = [*folder.problems, *log.problems]
        failure = None
        for event in folder.events:
            if event.get("kind") == "failed":
                failure = str(event.get("text"))

        report: dict[str, Any] = {
            "run": str(folder.path),
            "status": folder.status,
            "steps": log.last_step,
            "failed": failure,
            "findings": [asdict(finding) for finding in findings],
            "not_judged": log.not_judged,
            "too_early": log.too_early,
            "problems": problems,
        }
        reports.append(report)
        if args.json:
            continue

        why = f": {failure}" if folder.status == "failed" and failure is not None else ""
        print(visible(f"{folder.name}: {folder.status} at step {log.last_step}{why}"))
        for finding in findings:
            first, last = finding.steps
            print(
                visible(
                    f"  {finding.name}, steps {first} to {last}: {finding.evidence}\n    try: {finding.advice}"
                )
            )
        looked = len(DETECTORS) - len(log.not_judged) - len(log.too_early)
        print(
            f"  {'No further' if findings else 'No'} problems found ({looked} of {len(DETECTORS)} checks ran)."
        )
        if log.too_early:
            print(f"  Not checked, too early after {log.rounds} rounds: {', '.join(log.too_early)}")
        if log.not_judged:
            print(f"  Not checked, metrics missing: {', '.join(log.not_judged)}")
        for problem in problems:
            print(visible(f"swift why: {folder.name}: {problem}"), file=sys.stderr)

    if args.json:
        print(json.dumps(reports, indent=2))
    return EXIT_RUN_FAILED if any_findings else EXIT_OK
