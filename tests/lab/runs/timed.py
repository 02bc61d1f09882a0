"""Spans and events of a made-up run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START = 1_790_000_000.0
PHASES = ("generate", "reward", "train", "sync")


def write_spans(
    run: Path, lane: str, steps: int, length: float = 1.0, first: float = START
) -> list[dict[str, Any]]:
    """Four phases of `length` seconds a step, one after the other; returns them."""
    rows = [
        {"start": now, "end": now + length, "name": name, "step": step}
        for step in range(1, steps + 1)
        for number, name in enumerate(PHASES)
        for now in [first + length * (4 * (step - 1) + number)]
    ]
    _append(run, lane, rows)
    return rows


def write_lane(run: Path, lane: str, spans: Sequence[tuple[float, float, str, int]]) -> None:
    """Spans of a lane: start and end in seconds since the start, name, step."""
    _append(
        run,
        lane,
        [
            {"start": START + start, "end": START + end, "name": name, "step": step}
            for start, end, name, step in spans
        ],
    )


def _append(run: Path, lane: str, rows: list[dict[str, Any]]) -> None:
    (run / "spans").mkdir(exist_ok=True)
    with (run / "spans" / f"{lane}.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_events(run: Path, *events: tuple[float, int, str]) -> None:
    """Each with its seconds since the start, step and kind."""
    rows = [
        {"time": START + time, "step": step, "kind": kind, "text": "so"}
        for time, step, kind in events
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
