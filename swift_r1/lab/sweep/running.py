"""The runs of a sweep, from the first that waits to the last that ends: each a process with a place of its own."""

from __future__ import annotations

import difflib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from swift_r1.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, UsageError
from swift_r1.lab.runs.progress import seconds_left
from swift_r1.lab.sweep.flags import SweepArguments
from swift_r1.lab.sweep.judging import hopeless, recent
from swift_r1.lab.sweep.places import RunSlot
from swift_r1.lab.sweep.points import PlannedRun
from swift_r1.record.folder import RunFolder, is_run
from swift_r1.record.metric_log import MetricLog, Series
from swift_r1.runtime.processes import module_words, say
from swift_r1.workers.process import SupervisedProcess

State = Literal["waiting", "running", "stopping", "ended", "stopped", "failed", "interrupted"]
OUTPUT = "output.log"
_LOOK_S = 0.5
# ends of a run that was asked to end
_ASKED = (EXIT_INTERRUPTED, EXIT_TERMINATED, -signal.SIGTERM, -signal.SIGKILL)
# for a run to save and end, where --step_timeout does not say how long a step may take
_END_S = 3600.0


@dataclass(eq=False)
class SweepRun:
    """A planned run and what has become of it. `why` says what it was stopped for, or failed of."""

    plan: PlannedRun
    state: State = "waiting"
    why: str = ""
    process: SupervisedProcess | None = None
    place: RunSlot | None = None
    began: float = 0.0  # Unix seconds
    log: MetricLog = field(init=False)

    def __post_init__(self) -> None:
        self.log = MetricLog(self.plan.folder)
        self.log.refresh()

    @property
    def folder(self) -> RunFolder:
        """Opens the folder as it is now."""
        return RunFolder(self.plan.folder, self.plan.name)

    @property
    def output(self) -> Path:
        return self.plan.folder / OUTPUT

    @property
    def lives(self) -> bool:
        return self.state in ("running", "stopping")

    def value(self, metric: str, over: int) -> float:
        """Returns the metric at the last step; NaN before there is one."""
        series = self.log.get(metric)
        return recent(series, series.steps[-1] if series.steps else 0, over)

    def start(self, place: RunSlot) -> None:
        self.plan.folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, *module_words("swift_r1", "rlhf", *self.plan.words)]
        environ = os.environ | place.variables
        self.process = SupervisedProcess(
            words, environ, self.output, ends_with_parent=True, cpus=place.cpus
        )
        self.state = "running"
        self.place = place
        self.began = time.time()

    def ask_to_end(self) -> None:
        """Sends SIGTERM: the run ends after the step that it is in, and saves."""
        if self.process is not None and self.process.poll() is None:
            self.process.ask_to_end(self.plan.args.step_timeout or _END_S)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def look(self) -> None:
        """Reads what it has logged since; notes its end."""
        assert self.process is not None
        code = self.process.look()
        self.log.refresh()
        if code is None:
            return
        asked = self.state == "stopping" and code in _ASKED
        self.place = None
        if code == EXIT_OK:
            self.state = "ended"
            self.why = ""
        elif asked or code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
            self.state = "stopped" if self.why else "interrupted"
        else:
            self.state, self.why = "failed", self._cause(code)

    def _cause(self, code: int) -> str:
        assert self.process is not None
        if code < 0:
            likely = ", likely out of memory" if code == -signal.SIGKILL else ""
            return f"killed by {signal.Signals(-code).name}{likely}"
        for event in reversed(self.folder.events):
            if event.get("kind") == "failed" and float(event.get("time", 0)) >= self.began:
                return str(event.get("text"))
        return f"exit code {code}: {self.process.last_line()}"


class Sweep:
    """Runs what has not ended yet.

    Args:
        stopped: the points that were found hopeless before, with the reasons.
        changed: called whenever a run's state has changed.
        show: called at every look.
    """

    def __init__(
        self,
        args: SweepArguments,
        planned: Sequence[PlannedRun],
        places: Sequence[RunSlot],
        stopped: Mapping[str, str],
        changed: Callable[[SweepRun], None],
        show: Callable[[], None],
    ) -> None:
        self.args = args
        self.places = places
        self.stopped = dict(stopped)
        self.runs = [SweepRun(one) for one in planned]
        self._changed = changed
        self._show = show
        for run in self.runs:
            if is_run(run.plan.folder) and run.folder.status == "ended":
                run.state = "ended"
            elif why := self.stopped.get(run.plan.point):
                run.state = "stopped"
                run.why = why

    @property
    def living(self) -> list[SweepRun]:
        return [run for run in self.runs if run.lives]

    def count(self, *states: State) -> int:
        return sum(run.state in states for run in self.runs)

    def run(self) -> None:
        """Runs the sweep to the end of its last run; one that fails does not end the others. An exception, as of a
        signal, ends those that live in order. Raises UsageError: `--metric` is none of the runs'."""
        try:
            while self.living or self.count("waiting"):
                self._start()
                for run in self.living:
                    self._look(run)
                self._check_metric()
                self._judge()
                self._show()
                time.sleep(_LOOK_S)
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        free = [
            place for place in self.places if all(run.place is not place for run in self.living)
        ]
        waiting = [run for run in self.runs if run.state == "waiting"]
        for place, run in zip(free, waiting, strict=False):
            try:
                run.start(place)
            except OSError as error:
                run.state = "failed"
                run.why = f"it cannot be started: {error}"
            self._changed(run)

    def _look(self, run: SweepRun) -> None:
        before = run.state
        run.look()
        if run.state != before:
            self._changed(run)

    def _check_metric(self) -> None:
        """Raises UsageError where a run has logged a step without the metric that points are compared by: evaluations
        alone come later."""
        name = self.args.metric
        for run in self.runs:
            if run.log.get("loss") and not run.log.get(name) and not name.startswith("eval/"):
                near = difflib.get_close_matches(name, run.log.series, n=1)
                meant = f"; did you mean {near[0]}?" if near else ""
                raise UsageError(
                    f"--metric {name}: the steps of {run.plan.name} have no such metric{meant}"
                )

    def _judge(self) -> None:
        """Stops the points that are hopeless by now: their runs that live end, those that wait do not begin."""
        args = self.args
        if args.stop_after is None:
            return
        points: dict[str, list[Series]] = {}
        for run in self.runs:
            points.setdefault(run.plan.point, []).append(run.log.get(args.metric))
        limits = (args.over, args.stop_after, args.stop_behind, args.stop_below)
        for point, why in hopeless(points, *limits).items():
            for run in self.runs:
                if run.plan.point == point and run.state in ("waiting", "running"):
                    self.stopped[point] = run.why = f"{args.metric} {why}"
                    run.state = "stopping" if run.lives else "stopped"
                    self._changed(run)
                    run.ask_to_end()

    def _end(self) -> None:
        """Ends what lives; at once where another signal comes meanwhile."""
        if not self.living:
            return
        for run in self.living:
            run.state = "stopping"
            run.ask_to_end()
        count = len(self.living)
        say(
            f"{count} run{'s' * (count > 1)} to end, with a checkpoint after the step; once more ends at once",
            "sweep",
        )
        try:
            while self.living:
                for run in self.living:
                    self._look(run)
                self._show()
                time.sleep(_LOOK_S)
        finally:
            for run in self.living:
                run.kill()
                self._look(run)

    def seconds_left(self) -> float | None:
        """Estimates the rest of the whole sweep at the pace of the runs so far; None before there is one."""
        took = [run.folder.summary.get("seconds") for run in self.runs if run.state == "ended"]
        whole = [one for one in took if isinstance(one, int | float)]
        left = 0.0
        for run in self.living:
            own = seconds_left(run.folder, run.log)
            if own is not None:
                whole.append(time.time() - run.began + own)
                left += own
        if not whole:
            return None
        return (left + self.count("waiting") * sum(whole) / len(whole)) / len(self.places)
