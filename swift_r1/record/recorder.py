"""Everything a run leaves behind and shows: one object that the loop tells what happened."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from swift_r1.record.console import RunConsole
from swift_r1.record.events import AppendedLines, Events, Kind
from swift_r1.record.folder import EPISODE_TIMES
from swift_r1.record.metrics import JsonLines, merged, read_json_lines
from swift_r1.record.reporters import Reporter
from swift_r1.record.token_record import TokenRows, TokenWriter

_SHOWN_COMPLETIONS = 2

_CURVES: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward", "reward_std", "frac_reward_zero_std"),
    "length": ("completions/mean_length", "completions/max_length", "completions/clipped_ratio"),
    "loss": ("loss", "grad_norm", "learning_rate"),
    "policy": (
        "kl",
        "teacher_kl",
        "entropy",
        "clip_ratio/low",
        "clip_ratio/high",
        "rollout/logp_diff",
    ),
    "critic": (
        *("value_loss", "explained_variance", "returns/mean", "values/mean"),
        *("critic/grad_norm", "clip_ratio/value"),
    ),
    "time": ("time/generate", "time/reward", "time/train", "time/sync", "time/step"),
}
"""PNG file -> its panels."""


class Watch(Protocol):
    """Looks at the log of a run while it is written."""

    def line(self) -> None:
        """Takes note of a line that was written."""

    def end(self) -> str | None:
        """Returns what the console says of the run at its end, in a line."""


class Recorder:
    """Takes what happened in a run; this one, for ranks other than 0, ignores it."""

    def event(self, kind: Kind, text: str, **more: Any) -> None:
        """Something that is worth a mark on the run's time axis."""

    def phase(self, name: str, total: int) -> None: ...

    def phase_advance(self, count: int) -> None: ...

    def phase_end(self) -> None: ...

    def completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """A round's completions, as rows of `completions.jsonl`."""

    def episode_times(self, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """How long the calls of a round's episodes took; None for what is no episode."""

    def step(self, step: int, metrics: Mapping[str, float], last: bool) -> None:
        """An optimizer step is done."""

    def tokens(self, step: int, rows: TokenRows) -> None:
        """What the loss of an optimizer step did to the tokens of some completions."""

    def evaluation(
        self,
        step: int,
        metrics: Mapping[str, float],
        rows: Sequence[Mapping[str, Any]],
    ) -> None:
        """An evaluation of the weights of `step` is done."""

    def flush(self) -> None:
        """Waits until what was recorded is in its files."""

    def window(self) -> dict[str, list[float]]:
        """Returns the metrics since the last logged line, for a checkpoint."""
        return {}

    def restore_window(self, state: Mapping[str, Sequence[float]]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class RunRecorder(Recorder):
    """Writes `logging.jsonl`, `completions.jsonl`, `eval_completions.jsonl`, `episode_times.jsonl`, `tokens/`,
    `images/`, `summary.json`; feeds `events`, the console and the trackers. Use as a context manager: it closes them.
    With `show_completions` some are shown and sent to the trackers (all are in the file anyway). `watch` is told of
    each line of the log."""

    def __init__(
        self,
        run_dir: Path,
        console: RunConsole,
        reporters: Sequence[Reporter],
        logging_steps: int,
        show_completions: bool,
        first_step: bool = False,
        token_writer: TokenWriter | None = None,
        events: Events | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.console = console
        self.reporters = reporters
        self.token_writer = token_writer
        self.logging_steps = logging_steps
        self.show_completions = show_completions
        self.first_step = first_step
        self.events = events or Events()
        self._watch = watch
        names = ("logging", "completions", "eval_completions")
        self._files = self._log, self._completions, self._eval_completions = [
            JsonLines(run_dir / f"{name}.jsonl") for name in names
        ]
        self._times = AppendedLines(run_dir / EPISODE_TIMES)
        self._window: defaultdict[str, list[float]] = defaultdict(list)
        self._latest_rows: Sequence[Mapping[str, Any]] = ()
        self._step = 0

    def __enter__(self) -> Self:
        self.console.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.console.__exit__()
        for file in self._files:
            file.close()
        if self.token_writer is not None:
            self.token_writer.close()
        for reporter in self.reporters:
            reporter.close()

    def event(self, kind: Kind, text: str, **more: Any) -> None:
        self.events(kind, text, **more)

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

    def episode_times(self, rows: Sequence[Mapping[str, Any] | None]) -> None:
        self._times.write_all([row for row in rows if row is not None])

    def step(self, step: int, metrics: Mapping[str, float], last: bool) -> None:
        for name, value in metrics.items():
            self._window[name].append(value)
        self._step = self.events.step = step
        self.console.step_done(step)
        if step % self.logging_steps == 0 or last or (step == 1 and self.first_step):
            self._log_window()

    def _tell_watch(self) -> None:
        if self._watch is not None:
            self._watch.line()

    def _log_window(self) -> None:
        step = self._step
        line = {"step": step, **merged(self._window)}
        self._window.clear()
        self._log.write(line)
        self.console.logged(step, line)
        self._tell_watch()
        for reporter in self.reporters:
            reporter.log(line, step)
        if self.show_completions and self._latest_rows:
            self.console.show_completions(self._latest_rows[:_SHOWN_COMPLETIONS])
            for reporter in self.reporters:
                reporter.log_completions(self._latest_rows, step)

    def tokens(self, step: int, rows: TokenRows) -> None:
        if self.token_writer is not None:
            self.token_writer.write(step, rows)

    def flush(self) -> None:
        if self.token_writer is not None:
            self.token_writer.flush()

    def evaluation(
        self,
        step: int,
        metrics: Mapping[str, float],
        rows: Sequence[Mapping[str, Any]],
    ) -> None:
        self._log.write({"step": step, **metrics})
        for row in rows:
            self._eval_completions.write(row)
        accuracies = [
            f"{name.removeprefix('eval/').removesuffix('/accuracy')} {value:.3f}"
            for name, value in metrics.items()
            if name.endswith(("/accuracy", "/perplexity"))
        ]
        self.event("evaluated", ", ".join(accuracies))
        self.console.evaluated(step, metrics)
        self._tell_watch()
        for reporter in self.reporters:
            reporter.log(metrics, step)

    def window(self) -> dict[str, list[float]]:
        return {name: list(values) for name, values in self._window.items()}

    def restore_window(self, state: Mapping[str, Sequence[float]]) -> None:
        self._window = defaultdict(list, {name: list(values) for name, values in state.items()})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Logs what is left, draws the curves and writes `summary.json`, last of all."""
        if self._window:
            self._log_window()
        verdict = self._watch.end() if self._watch is not None else None
        draw_curves(read_json_lines(self.run_dir / "logging.jsonl"), self.run_dir / "images")
        (self.run_dir / "summary.json").write_text(
            json.dumps(dict(summary), indent=2) + "\n", encoding="utf-8"
        )
        self.event("ended", f"after step {summary['steps']}", exit_code=summary["exit_code"])
        self.console.say(f"run folder: {self.run_dir}")
        if verdict:
            self.console.say(verdict)


def draw_curves(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draws one PNG per family of metrics, with a panel for each that the rows hold; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({name for row in rows for name in row})
    families = dict(_CURVES)
    families["rewards"] = tuple(
        name for name in names if name.startswith("rewards/") and name.endswith("/mean")
    )
    families["eval"] = tuple(
        name
        for name in names
        if name.startswith("eval/") and name.endswith(("/accuracy", "/reward"))
    )
    files = []
    for family, wanted in families.items():
        present = [name for name in wanted if name in names]
        if present:
            files.append(_draw(rows, present, folder / f"{family}.png"))
    return files


def _draw(rows: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.4 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, squeeze=False)[:, 0]
    for panel, name in zip(panels, names, strict=True):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        panel.plot(
            *zip(*points, strict=True) if points else ((), ()),
            marker="." if len(points) < 60 else "",
        )
        panel.set_title(name, fontsize=9, loc="left")
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    figure.savefig(path, dpi=110)
    return path
