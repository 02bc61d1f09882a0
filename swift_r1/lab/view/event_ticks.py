"""The events of a run, as marks on the x axis of a chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nicegui import ui

from swift_r1.lab.runs.timeline import Mark
from swift_r1.lab.view.charts import Tick

_MOST = 60  # in a chart
_RARE_FIRST = (
    *("evaluated", "saved", "skipped"),
    *("server_joined", "server_left", "server_restored", "server_lost"),
)
"""What is left out where there are too many marks, and in this order."""
_SHOWN = {
    "started": ("▸", "var(--muted)"),
    "resumed": ("↻", "var(--series-2)"),
    "saved": ("s", "var(--muted)"),
    "skipped": ("!", "var(--series-4)"),
    "evaluated": ("e", "var(--muted)"),
    "server_lost": ("↓", "var(--series-1)"),
    "server_restored": ("↑", "var(--series-2)"),
    "server_joined": ("+", "var(--series-2)"),
    "server_left": ("−", "var(--muted)"),
    "stopping": ("□", "var(--series-4)"),
    "failed": ("✕", "var(--series-1)"),
    "killed": ("✕", "var(--series-1)"),
    "ended": ("■", "var(--muted)"),
}


def ticks(marks: Sequence[Mark], x: Callable[[Mark], float]) -> list[Tick]:
    """Returns the marks at the places that `x` gives."""
    shown = list(marks)
    for kind in _RARE_FIRST:
        if len(shown) > _MOST:
            shown = [mark for mark in shown if mark.kind != kind]
    found = []
    for mark in shown[-_MOST:]:
        letter, colour = _SHOWN.get(mark.kind, ("?", "var(--muted)"))
        found.append(
            Tick(
                x(mark),
                letter,
                f"{mark.kind.replace('_', ' ')}: {mark.text} (step {mark.step})",
                colour,
            )
        )
    return found


def legend() -> None:
    """Puts what the marks are on a page, for the list of its keys (`?`)."""
    kinds = [f"{letter} {kind.replace('_', ' ')}" for kind, (letter, _) in _SHOWN.items()]
    ui.element("span").props(f'hidden data-marks="{"|".join(kinds)}"')
