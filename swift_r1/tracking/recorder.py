"""Everything a run leaves behind and shows: one object that the loop tells what happened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swift_r1.tracking.console import RunConsole
from swift_r1.tracking.metrics import JsonLines, MetricWindow, read_json_lines
from swift_r1.tracking.plots import draw_curves
from swift_r1.tracking.reporters import Reporter

_SHOWN_COMPLETIONS = 2


class Recorder:
    """Is told what happened in a run, and forgets it: for the ranks that are not rank 0."""

    def phase(self, name: str, total: int) -> None: ...

    def phase_advance(self, count: int) -> None: ...

    def phase_end(self) -> None: ...

    def completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """A round's completions, as rows of `completions.jsonl`."""

    def step(self, step: int, metrics: Mapping[str, float], last: bool) -> None:
        """An optimizer step is done."""

    def evaluation(self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
        """An evaluation of the weights of `step` is done."""

    def window(self) -> dict[str, list[float]]:
        """Metrics since the last logged line, for a checkpoint."""
        return {}

    def restore_window(self, state: Mapping[str, Sequence[float]]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class RunRecorder(Recorder):
    """Writes `logging.jsonl`, `completions.jsonl`, `eval_completions.jsonl`, `images/`, `summary.json`; feeds the
    console and the trackers. Use as a context manager: it closes them.

    Args:
        logging_steps: steps between two lines of metrics.
        show_completions: `--log_completions`, show some and send them to the trackers (all are in the file anyway).
    """

    def __init__(
        self,
        run_dir: Path,
        console: RunConsole,
        reporters: Sequence[Reporter],
        logging_steps: int,
        show_completions: bool,
    ) -> None:
        self.run_dir, self.console, self.reporters = run_dir, console, reporters
        self.logging_steps, self.show_completions = logging_steps, show_completions
        self._log = JsonLines(run_dir / "logging.jsonl")
        self._completions = JsonLines(run_dir / "completions.jsonl")
        self._eval_completions = JsonLines(run_dir / "eval_completions.jsonl")
        self._window = MetricWindow()
        self._latest_rows: Sequence[Mapping[str, Any]] = ()
        self._step = 0

    def __enter__(self) -> Self:
        self.console.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.console.__exit__(kind, error, trace)
        for file in (self._log, self._completions, self._eval_completions):
            file.close()
        for reporter in self.reporters:
            reporter.close()

    def phase(self, name: str, total: int) -> None:
        self.console.phase(name, total)

    def phase_advance(self, count: int) -> None:
        self.console.phase_advance(count)

    def phase_end(self) -> None:
        self.console.phase_end()

    def completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._completions.write(row)
        self._latest_rows = rows

    def step(self, step: int, metrics: Mapping[str, float], last: bool) -> None:
        self._window.add(metrics)
        self._step = step
        self.console.step_done(step, metrics)
        if step % self.logging_steps == 0 or last:
            self._log_window()

    def _log_window(self) -> None:
        step = self._step
        line = {"step": step, **self._window.flush()}
        self._log.write(line)
        self.console.logged(step, line)
        for reporter in self.reporters:
            reporter.log(line, step)
        if self.show_completions and self._latest_rows:
            self.console.show_completions(self._latest_rows[:_SHOWN_COMPLETIONS])
            for reporter in self.reporters:
                reporter.log_completions(self._latest_rows, step)

    def evaluation(self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
        self._log.write({"step": step, **metrics})
        for row in rows:
            self._eval_completions.write(row)
        self.console.evaluated(step, metrics)
        for reporter in self.reporters:
            reporter.log(metrics, step)

    def window(self) -> dict[str, list[float]]:
        return self._window.state()

    def restore_window(self, state: Mapping[str, Sequence[float]]) -> None:
        self._window.restore(state)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Logs what is left, draws the curves and writes `summary.json`, last of all."""
        if self._window.state():
            self._log_window()
        draw_curves(read_json_lines(self.run_dir / "logging.jsonl"), self.run_dir / "images")
        (self.run_dir / "summary.json").write_text(json.dumps(dict(summary), indent=2) + "\n", encoding="utf-8")
        self.console.say(f"run folder: {self.run_dir}")
