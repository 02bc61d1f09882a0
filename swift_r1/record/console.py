"""The console of a run: a line per log step, and on a terminal bars under it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from swift_r1.runtime.terminal import Terminal, duration

_SHOWN = {
    "token_accuracy": "tokens right {:.0%}",
    "rewards/accuracies": "pairs right {:.0%}",
    "rewards/margins": "margin {:.3f}",
    "kl": "KL {:.4f}",
    "teacher_kl": "KL to the teacher {:.4f}",
    "completions/clipped_ratio": "cut off {:.0%}",
    "completions/mean_length": "{:.0f} tok",
    "time/step": "{:.1f} s",
}
"""What the line of a step shows after the rewards."""
_LINES_S = 60.0  # between two lines about the current work, where there is no terminal


def progress_bar(console: Console) -> Progress:
    """Returns a bar for a terminal; it shows nothing elsewhere."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        # seconds; a step may take minutes, and rich's 30 s then give no estimate
        speed_estimate_period=1800,
    )


class RunConsole:
    """The progress of `total_steps` optimizer steps. Use as a context manager.

    Args:
        first_reward: of the run's first line, if it goes on with one: rewards are shown with their change since then.
        replays: rewards are recorded ones; instead of their change it shows how far the policy has moved.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        first_reward: float | None = None,
        replays: bool = False,
    ) -> None:
        self.console = console or Terminal(stderr=True)
        self._progress = progress_bar(self.console)
        self._total = total_steps
        self._steps = self._progress.add_task("steps", total=total_steps)
        self._phase: TaskID | None = None
        self._told = 0.0
        self._first_reward = first_reward
        self._replays = replays

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.console.print(Text(text), soft_wrap=True)

    def phase(self, name: str, total: int) -> None:
        """Shows a second bar for the current work (`generating`, `evaluating`); a line a minute without a terminal."""
        self.phase_end()
        self._told = time.monotonic()
        self._phase = self._progress.add_task(name, total=total)

    def phase_advance(self, count: int) -> None:
        if self._phase is None:
            return
        self._progress.advance(self._phase, count)
        if self._progress.disable and time.monotonic() >= self._told + _LINES_S:
            self._told = time.monotonic()
            phase = self._progress.tasks[-1]
            self.say(f"{phase.description}: {phase.completed} of {phase.total} completions")

    def phase_end(self) -> None:
        if self._phase is not None:
            self._progress.remove_task(self._phase)
            self._phase = None

    def step_done(self, step: int) -> None:
        self._progress.update(self._steps, completed=step)

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Says what the steps since the last line gave, and how long the rest takes."""
        shown = [f"step {step}/{self._total}", *self._rewards(metrics)]
        shown += [form.format(metrics[name]) for name, form in _SHOWN.items() if name in metrics]
        left = self._progress.tasks[0].time_remaining
        if left:
            shown.append(f"{duration(left)} left")
        self.say(" · ".join(shown))

    def _rewards(self, metrics: Mapping[str, float]) -> list[str]:
        """Returns the reward with its change since the first line, and where several make it up the first of them,
        which says what is right; the loss of a run without rewards."""
        if "reward" not in metrics:
            return [f"loss {metrics['loss']:.4f}"]
        reward = metrics["reward"]
        shown = [f"reward {reward:.3f}"]
        if self._replays:
            shown[0] = f"recorded {shown[0]}"
            if "policy/moved" in metrics:
                shown.append(f"moved {metrics['policy/moved']:.2g}")
        elif self._first_reward is None:
            self._first_reward = reward
        else:
            shown[0] += f" ({reward - self._first_reward:+.3f})"
        several = [
            name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")
        ]
        for name in several[:1] if len(several) > 1 else ():
            short = name.removeprefix("rewards/").removesuffix("/mean")
            shown.append(f"{short} {metrics[name]:.2f}")
        return shown

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        for prefix in (
            name.removesuffix("accuracy") for name in metrics if name.endswith("/accuracy")
        ):
            dataset = prefix.removeprefix("eval/").rstrip("/")
            own = {
                key.removeprefix(prefix): item
                for key, item in metrics.items()
                if key.startswith(prefix)
            }
            value = own["accuracy"]
            if "completions" not in own:  # the mean of several sets
                self.say(f"step {step}: held-out accuracy {value:.3f}, the mean of the data sets")
                continue
            bounds = [
                own[key]
                for key in sorted(own)
                if key.startswith("avg@") and key.endswith(("/high", "/low"))
            ]
            interval = f"95 %: {bounds[1]:.3f} to {bounds[0]:.3f}; " if bounds else ""
            self.say(
                f"step {step}: held-out accuracy {value:.3f} on {dataset}"
                f" ({interval}{own['completions']:.0f} completions, mean reward {own['reward']:.3f})"
            )

        for name, value in metrics.items():
            dataset = name.removeprefix("eval/").removesuffix("/perplexity")
            if name.endswith("/perplexity"):
                right = metrics[f"eval/{dataset}/token_accuracy"]
                self.say(
                    f"step {step}: held-out perplexity {value:.3f}, token accuracy {right:.3f} on {dataset}"
                )
            dataset = name.removeprefix("eval/").removesuffix("/rewards/accuracies")
            if name.endswith("/rewards/accuracies"):
                margin = metrics[f"eval/{dataset}/rewards/margins"]
                self.say(
                    f"step {step}: held-out pairs right {value:.3f}, margin {margin:.3f} on {dataset}"
                )

    def show_completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        table = Table(title="completions", title_justify="left", show_lines=True)
        for name in ("prompt", "completion", "reward", "advantage"):
            table.add_column(name, overflow="fold")
        for row in rows:
            reward = row["reward"]
            advantage = row["advantage"]
            table.add_row(
                row["prompt"][-400:],
                row["completion"],
                f"{reward:.3f}",
                "" if advantage is None else f"{advantage:.3f}",
            )
        self._progress.console.print(table)
