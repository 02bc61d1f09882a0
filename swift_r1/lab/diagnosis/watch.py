"""The detectors over a run folder: after each line of its log, while it is written or later."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from swift_r1.errors import describe
from swift_r1.lab.diagnosis import learning, machine, policy, text  # noqa: F401  each registers its detectors
from swift_r1.lab.diagnosis.past import DETECTORS, Detector, Past, Sign
from swift_r1.lab.diagnosis.verdict import Verdict, headed, verdict_of
from swift_r1.record.events import AppendedLines
from swift_r1.record.folder import DIAGNOSIS, RunFolder
from swift_r1.record.metric_log import MetricLog

logger = logging.getLogger("swift_r1.lab.diagnosis")

FIRST_VERDICT = (
    8  # rounds, after which a run says how it learns; again after twice as many, and so on
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A row of `diagnosis.jsonl`. `steps` are the first and the last of those in which it held when it was found;
    `numbers` are the means of its metrics there, and in the first rounds."""

    name: str
    steps: tuple[int, int]
    evidence: str
    advice: str
    numbers: Mapping[str, Mapping[str, float]]

    @property
    def line(self) -> str:
        return f"{self.name}, steps {self.steps[0]} to {self.steps[1]}: {self.evidence}; try: {self.advice}"


class Diagnosis(MetricLog):
    """A run's log, and what the detectors find in it, each at most once. Reads it on `refresh`, and looks after each
    line: a run that goes on and one that is over say the same. A detector that fails is one of the `problems`."""

    def __init__(self, run: Path, detectors: Sequence[Detector] = DETECTORS) -> None:
        self._detectors = detectors
        self._faults: dict[str, str] = {}
        folder = RunFolder(run, run.name)
        self.past = Past.of(self, folder)
        super().__init__(run)

    def _forget(self) -> None:
        super()._forget()
        self.findings: dict[str, Finding] = {}

    def _add(self, row: Mapping[str, Any]) -> bool:
        if not super()._add(row):
            return False
        seen = [(one, sign) for one in self._detectors if (sign := self._look(one)) is not None]
        names = {*self.findings, *(one.name for one, _ in seen)}
        self.findings |= {
            one.name: self._finding(one, sign) for one, sign in seen if names.isdisjoint(one.under)
        }
        return True

    def _look(self, one: Detector) -> Sign | None:
        if one.name in self.findings or one.name in self._faults:
            return None
        try:
            return one.look(self.past, one.rounds)
        except Exception as error:  # noqa: BLE001  whatever it is, the run goes on
            self._faults[one.name] = f"the detector of {one.name!r} failed: {describe(error)}"
            return None

    def _finding(self, one: Detector, sign: Sign) -> Finding:
        numbers = {}
        for name in one.metrics(self):
            values = {"first": self.past.first(name), "last": self.past.last(name, one.rounds)}
            numbers[name] = {when: fmean(some) for when, some in values.items() if some}
        begin = max(1, self.last_step - one.rounds * self.past.round + 1)
        return Finding(one.name, (begin, self.last_step), *sign, numbers)

    @property
    def verdict(self) -> Verdict | None:
        """Returns whether the reward rises, and why not; None before the second round. One that fails is one of the
        `problems`."""
        signs = {name: Sign(one.evidence, one.advice) for name, one in self.findings.items()}
        try:
            return verdict_of(self.past, signs)
        except Exception as error:  # noqa: BLE001  whatever it is, the run goes on
            self._faults["verdict"] = f"the verdict failed: {describe(error)}"
            return None

    @property
    def not_judged(self) -> list[str]:
        """Returns the detectors that have nothing to look at: none of their metrics is logged."""
        return [one.name for one in self._detectors if not one.metrics(self)]

    @property
    def too_early(self) -> list[str]:
        """Returns the detectors whose metrics are logged, but of fewer rounds than they look at."""
        waiting = [
            one
            for one in self._detectors
            if one.rounds > self.past.rounds and one.name not in self.findings
        ]
        return [one.name for one in waiting if one.metrics(self)]

    @property
    def rounds(self) -> int:
        """Returns the rounds that the run has trained."""
        return self.past.rounds

    @property
    def problems(self) -> list[str]:
        return [*super().problems, *self._faults.values()]


class LiveDiagnosis:
    """Says what is found in a run that trains, in its log and in `diagnosis.jsonl`: each once in the run's life; and
    in its log the verdict, in rounds 8, 16, 32, ... and at the end."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._diagnosis = Diagnosis(run)
        self._diagnosis.refresh()  # what a resumed run has logged already
        self._next_round = FIRST_VERDICT
        self._pass_rounds()
        self._judged = 0  # the step of the last verdict
        self._file = AppendedLines(run / DIAGNOSIS)
        self._said = {str(row.get("name")) for row in RunFolder(run, run.name).findings}

    def line(self) -> None:
        """Takes note of a line that was written."""
        self._diagnosis.refresh()
        for finding in self._diagnosis.findings.values():
            if finding.name not in self._said:
                self._said.add(finding.name)
                self._file.write(asdict(finding))
                logger.warning("%s", finding.line)
        for problem in self._diagnosis.problems:
            if problem not in self._said:
                self._said.add(problem)
                logger.warning("%s", problem)
        if self._diagnosis.rounds >= self._next_round:
            self._pass_rounds()
            self._judge()

    def end(self) -> str | None:
        """Returns the verdict in brief, and where the rest of it is to be read."""
        verdict = self._diagnosis.verdict
        if verdict is None and not self._diagnosis.past.replays:
            return None
        if self._judged != self._diagnosis.last_step:
            self._judge()
        said = headed(verdict, self._diagnosis.past)
        return f"{said}; swift why {shlex.quote(str(self._run))}"

    def _pass_rounds(self) -> None:
        while self._next_round <= self._diagnosis.rounds:
            self._next_round *= 2

    def _judge(self) -> None:
        """Logs the verdict: a warning where something should be done."""
        verdict = self._diagnosis.verdict
        if verdict is None:
            return
        self._judged = self._diagnosis.last_step
        level = logging.INFO if verdict.is_good else logging.WARNING
        logger.log(level, "step %s: %s", self._judged, verdict.line)
