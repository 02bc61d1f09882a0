"""`swift why`: whether runs learn, and what keeps them from it, from what they have logged. Writes nothing in their
folders."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from swift_r1.errors import EXIT_FINDING, EXIT_OK, UsageError
from swift_r1.flags.fields import Scope, flag, spellings
from swift_r1.flags.parser import Command, is_flag, parse_arguments, spelling
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
swift why RUN --try true [--flag value ...]

Says whether the reward of a run rises, by how much, and if not, why not: what keeps it from rising, on what
evidence, and what to try. Then come the signs of trouble that the run has reported while it trained
(diagnosis.jsonl). RUN is the folder of a run, or one that holds runs: still training, ended, or killed.
docs/diagnosis.md lists what it looks for. Exit code 0 if nothing is found, 6 if something is.

--try turns the advice against the first cause that has flags into those flags, or takes the flags of `swift rlhf` that
are given. It replays the first rounds with and without them (the run must have had --log_tokens all), compares the two,
says what that shows and what only a new run can show, and prints the command of that run."""
_EXAMPLES = """
swift why output/model/v0-20261121-120000
swift why output --json
swift why output/model/v0-20261121-120000 --try true
swift why output/model/v0-20261121-120000 --try true --learning_rate 1e-6 --rounds 8
"""
_TRIES = Scope(lambda args: args.trial, "without --try true")


@dataclass(frozen=True, kw_only=True)
class WhyArguments(Command):
    """Why."""

    command: ClassVar[str] = "why"
    runs: list[str] = flag([], "folders of runs, or that hold runs", positional=True, required=True)
    json: bool = flag(False, "print a JSON list, an object for each run")
    trial: bool = flag(
        False,
        "replay the run's first rounds with the flags of the advice, or with those given",
        aliases=("try",),
    )
    rounds: int = flag(4, "rounds that are replayed", _TRIES, at_least=1)
    output_dir: str | None = flag(
        None, "folder for both replays (default: one that is removed)", _TRIES
    )


HELP = (_USAGE, WhyArguments, _EXAMPLES)


def run(words: Sequence[str]) -> int:
    """Runs the command. Raises UsageError: bad flags or folders."""
    own, others = _divided(words)
    args = parse_arguments(WhyArguments, own)
    folders = find_runs(args.runs)
    if args.trial:
        folders = [folder for folder in folders if not folder.supervised] or folders
    if args.trial and len(folders) > 1:
        raise UsageError(
            f"--try is of one run, and these are {len(folders)}: name the folder of one"
        )
    reports = []
    any_findings = False
    for folder in folders:
        log = Diagnosis(folder.path)
        log.refresh()
        verdict = log.verdict
        causes = verdict.causes if verdict is not None else ()
        any_findings |= bool(log.findings) or any(cause.fault for cause in causes)
        trial = None
        if args.trial:
            from swift_r1.cli.trial import show, try_flags

            trial = try_flags(folder, verdict, others, args.rounds, args.output_dir)
        if args.json:
            report = _report(folder, log, verdict)
            reports.append(report if trial is None else report | {"try": asdict(trial)})
            continue
        why = f": {_failure(folder)}" if folder.status == "failed" else ""
        lines = [
            f"{folder.name}: {folder.status} at step {log.last_step}{why}",
            *_lines(folder, log, verdict),
        ]
        print(visible("\n".join(lines)))
        if trial is not None:
            show(trial)
        for problem in (*folder.problems, *log.problems):
            print(visible(f"swift why: {folder.name}: {problem}"), file=sys.stderr)

    if args.json:
        print(json.dumps(standard_json(reports), indent=2))
    return EXIT_FINDING if any_findings else EXIT_OK


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of this command, and with `--try` those of a run's flags."""
    known = spellings(WhyArguments)
    own: list[str] = []
    others: list[str] = []
    into = own
    for word in words:
        if is_flag(word):
            into = own if spelling(word.partition("=")[0]) in known else others
        into.append(word)
    tries = any(spelling(word.partition("=")[0]) in ("try", "trial") for word in own)
    return (own, others) if tries else (list(words), [])


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
    yield f"  {headline(verdict, log)}"
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
