"""What a chart of curves shows, without a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_r1.lab.runs.curves import (
    LEARNING,
    QUESTIONS,
    Panel,
    RunGroup,
    constant,
    curves,
    panels,
)
from swift_r1.record.metric_log import MetricLog


def log(folder: Path, *rows: dict[str, Any]) -> MetricLog:
    folder.mkdir()
    text = "".join(json.dumps({"step": step} | row) + "\n" for step, row in enumerate(rows, 1))
    (folder / "logging.jsonl").write_text(text)
    found = MetricLog(folder)
    found.refresh()
    return found


def reward(mean: float, deviation: float) -> dict[str, float]:
    return {
        "rewards/countdown/mean": mean,
        "rewards/countdown/stderr": 0.1,
        "rewards/countdown/std": deviation,
        "reward": mean,
        "reward_stderr": 0.1,
    }


def panel(found: list[Panel], title: str) -> Panel:
    return next(one for one in found if one.title == title)


def test_a_band_is_the_interval_of_the_mean(tmp_path: Path) -> None:
    group = RunGroup("run", (), [log(tmp_path / "run", reward(0.05, 0.2), reward(0.5, 0.5))])
    [line] = curves(panel(panels([group]), "Reward"), [group])
    assert line.points == [(1, 0.05), (2, 0.5)]
    assert [round(end, 3) for end in line.band[0]] == [1, -0.146, 0.246]
    [spread] = curves(panel(panels([group]), "Spread of rewards"), [group])
    assert [y for _, y in spread.points] == [0.2, 0.5] and not spread.band
    [smooth] = curves(panel(panels([group]), "Reward"), [group], 0.5)
    assert smooth.points[1] == (2, (0.5 * 0.05 / 2 + 0.5 * 0.5) / 0.75)


def test_the_band_of_seeds_goes_from_the_lowest_to_the_highest(tmp_path: Path) -> None:
    logs = [log(tmp_path / f"{n}", reward(0.1 * n, 0.2), reward(0.5, 0.5)) for n in (1, 3)]
    group = RunGroup("runs", (), logs)
    [line] = curves(panel(panels([group]), "Reward"), [group])
    assert line.points[0] == (1, pytest.approx(0.2))
    assert line.band[0] == (1, pytest.approx(0.1), pytest.approx(0.3))


def test_what_does_not_change_is_a_line_of_text_unless_it_tells_whether_the_run_learns(
    tmp_path: Path,
) -> None:
    row = {"reward": 0.0, "clip_ratio/low": 0.0, "clip_ratio/high": 0.25, "entropy": 1.0}
    group = RunGroup("run", (), [log(tmp_path / "run", row, row | {"entropy": 2.0})])
    found = panels([group])
    said = {one.title: constant(one, [group]) for one in found}
    assert said["Clipped ratios"] == "Clipped ratios: low 0, high 0.25"
    assert said["Entropy of the policy"] == said["Reward"] == ""
    assert found[0].question == LEARNING
    order = [QUESTIONS.index(one.question) for one in found]
    assert order == sorted(order)
