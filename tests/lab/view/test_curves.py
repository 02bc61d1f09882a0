"""What a chart of curves shows, without a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift_r1.lab.view.curves import (
    LEARNING,
    QUESTIONS,
    CurveControls,
    Panel,
    RunGroup,
    about,
    constant,
    lines,
    panels,
)
from swift_r1.record.glossary.titles import TITLES
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


def test_a_band_is_the_interval_of_the_mean_within_what_is_possible(tmp_path: Path) -> None:
    # values of 0 and 1 have the variance mean (1 - mean); others may leave 0 to 1
    binary = log(tmp_path / "binary", reward(0.05, 0.2179), reward(0.5, 0.5))
    other = log(tmp_path / "other", reward(0.05, 0.5), reward(0.5, 0.5))
    for one, low in ((binary, 0.0), (other, 0.05 - 0.196)):
        group = RunGroup("run", [one])
        [line] = lines(panel(panels([group]), "Reward"), [group], CurveControls())
        assert line.band[0][1] == low and abs(line.band[0][2] - 0.246) < 1e-9
    group = RunGroup("run", [binary])
    [spread] = lines(panel(panels([group]), "Spread of rewards"), [group], CurveControls())
    assert [y for _, y in spread.points] == [0.2179, 0.5] and not spread.band


def test_a_logarithm_cuts_the_band_at_the_lowest_value(tmp_path: Path) -> None:
    group = RunGroup("run", [log(tmp_path / "run", reward(0.05, 0.5), reward(0.5, 0.5))])
    drawn = panel(panels([group]), "Reward")
    [line] = lines(drawn, [group], CurveControls(log=True))
    assert [low for _, low, _ in line.band] == [0.05, 0.5 - 0.196]


def test_answers_are_learned_by_their_loss(tmp_path: Path) -> None:
    row = {"loss": 2.0, "token_accuracy": 0.5, "grad_norm": 1.0, "eval/held/perplexity": 3.0}
    group = RunGroup("run", [log(tmp_path / "run", row, row | {"loss": 1.0})])
    asked = {one.title: one.question for one in panels([group])}
    learning = {title for title, question in asked.items() if question == LEARNING}
    assert learning == {"Held-out perplexity: held", "Loss", TITLES["token_accuracy"]}


def test_what_does_not_change_is_a_line_of_text_unless_it_tells_whether_the_run_learns(
    tmp_path: Path,
) -> None:
    row = {"reward": 0.0, "clip_ratio/low": 0.0, "clip_ratio/high": 0.25, "entropy": 1.0}
    group = RunGroup("run", [log(tmp_path / "run", row, row | {"entropy": 2.0})])
    found = panels([group])
    said = {one.title: constant(one, [group]) for one in found}
    assert said["Clipped ratios"] == "Clipped ratios: low 0, high 0.25"
    assert said["Entropy of the policy"] == said["Reward"] == ""
    assert found[0].question == LEARNING
    order = [QUESTIONS.index(one.question) for one in found]
    assert order == sorted(order)


def test_colours_are_runs_and_strokes_are_metrics_where_there_are_several(tmp_path: Path) -> None:
    rows = [{"completions/mean_length": 10.0 + n, "completions/max_length": 20.0} for n in (1, 2)]
    groups = [
        RunGroup(name, [log(tmp_path / name, *rows)], opens=f"/completions?run={name}", every=2)
        for name in ("one", "other")
    ]
    drawn = panel(panels(groups), "Completion length")
    found = lines(drawn, groups, CurveControls())
    assert [(one.name, one.colour, one.dash) for one in found] == [
        ("one", 0, 0),
        ("one · longest", 0, 1),
        ("other", 1, 0),
        ("other · longest", 1, 1),
    ]
    assert about(drawn, groups) == "tokens; mean solid, longest dashed"
    assert (found[2].opens, found[2].every) == ("/completions?run=other", 2)


def test_tasks_share_a_chart_of_their_rewards(tmp_path: Path) -> None:
    rows = [{"reward": 0.5, "tasks/b/reward": 0.9, "tasks/a/reward": 0.1, "tasks/a/prompts": 3}] * 2
    group = RunGroup("run", [log(tmp_path / "run", *rows)])
    assert panel(panels([group]), "Reward by task").metrics == {
        "tasks/a/reward": "a",
        "tasks/b/reward": "b",
    }
    assert panel(panels([group], everything=True), "tasks/a/prompts")
