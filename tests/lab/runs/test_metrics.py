"""The metrics of a run: read while its file grows, smoothed, thinned out, averaged over seeds."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.record.metric_log import (
    MetricLog,
    Series,
    over_seeds,
    same_but_seed,
    smoothed,
    thinned,
)


def written(folder: Path, *rows: dict[str, object] | str) -> MetricLog:
    with (folder / "logging.jsonl").open("a") as file:
        for row in rows:
            file.write(row if isinstance(row, str) else json.dumps(row) + "\n")
    return MetricLog(folder)


def pairs(series: Series) -> list[tuple[int, float]]:
    return list(zip(series.steps, series.values, strict=True))


def test_new_lines_are_read_once_and_a_half_written_one_waits(tmp_path: Path) -> None:
    log = MetricLog(tmp_path)
    assert not log.refresh()
    assert log.problems == []
    written(tmp_path, {"step": 1, "loss": 0.5}, '{"step": 2, "lo')
    assert log.refresh()
    assert not log.refresh()
    assert pairs(log.get("loss")) == [(1, 0.5)]
    assert log.problems == ["logging.jsonl: the last line is half-written, and left out"]
    written(tmp_path, 'ss": 0.25, "new": 3}\n')
    assert log.refresh()
    assert pairs(log.get("loss")) == [(1, 0.5), (2, 0.25)]
    assert pairs(log.get("new")) == [(2, 3.0)]
    assert (log.last_step, log.problems) == (2, [])


def test_a_file_that_a_resume_has_cut_is_read_again(tmp_path: Path) -> None:
    log = written(tmp_path, *({"step": step, "loss": step} for step in range(1, 9)))
    log.refresh()
    (tmp_path / "logging.jsonl").write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 7}\n')
    assert log.refresh()
    assert pairs(log.get("loss")) == [(1, 1.0), (2, 7.0)]


def test_damage_is_left_out_and_said(tmp_path: Path) -> None:
    log = written(
        tmp_path,
        {"step": 1, "loss": 1},
        "\0\0{\n",
        "[]\n",
        {"loss": 2},
        {"step": "3"},
        {"step": 4, "loss": None},
    )
    log.refresh()
    assert log.get("loss").steps.tolist() == [1, 4]
    assert math.isnan(log.get("loss").values[1])
    assert log.problems == ["logging.jsonl: 4 damaged lines are left out"]


def test_evaluations_with_their_intervals(tmp_path: Path) -> None:
    name = "eval/math/hard"
    found = {
        f"{name}/accuracy": 0.5,
        f"{name}/avg@4": 0.5,
        f"{name}/avg@4/low": 0.4,
        f"{name}/avg@4/high": 0.6,
    }
    other = {"step": 1, "loss": 1, "rewards/format/mean": 1}
    log = written(tmp_path, {"step": 0, **found}, other, {"step": 9, **found})
    log.refresh()
    assert log.benchmarks() == {"math/hard": ["accuracy", "avg@4"]}
    assert log.rewards() == ["format"]
    for estimate in ("accuracy", "avg@4"):
        assert [
            (one.step, one.value, one.low, one.high)
            for one in log.evaluations("math/hard", estimate)
        ] == [
            (0, 0.5, 0.4, 0.6),
            (9, 0.5, 0.4, 0.6),
        ]


def test_hours_are_those_of_the_steps_between_two_lines(tmp_path: Path) -> None:
    log = written(tmp_path, {"step": 1, "time/step": 3600, "time/train": 900})
    log.refresh()
    assert [log.hours(phase) for phase in ("step", "train", "sync")] == [1, 0.25, 0]
    written(tmp_path, {"step": 5, "time/step": 1800})
    log.refresh()
    assert log.hours() == 3


def test_smoothing_is_a_mean_that_forgets() -> None:
    assert smoothed([1, math.nan, 2], 0) == pytest.approx([1, math.nan, 2], nan_ok=True)
    assert smoothed([1, 1, 1], 0.9) == pytest.approx([1, 1, 1])
    assert smoothed([0, 3], 0.5)[1] == pytest.approx((0.5 * 0 + 1 * 3) / 1.5)
    with pytest.raises(ValueError, match="less than 1"):
        smoothed([1], 1)


@settings(deadline=None)
@given(st.lists(st.floats(allow_infinity=True, allow_nan=True), max_size=300), st.integers(2, 40))
def test_thinned_points_are_the_files_own_and_hold_the_extremes(
    values: list[float], most: int
) -> None:
    shown = thinned(range(len(values)), values, most)
    assert len(shown) <= max(most, 2)
    assert [x for x, _ in shown] == sorted({x for x, _ in shown})
    assert all(
        y == values[int(x)] if y is not None else not math.isfinite(values[int(x)])
        for x, y in shown
    )
    known = [value for value in values if math.isfinite(value)]
    if known:
        ys = [y for _, y in shown if y is not None]
        assert (min(ys), max(ys)) == (min(known), max(known))


def test_seeds_are_averaged_where_they_have_values() -> None:
    one, two = Series(), Series()
    for step, value in ((1, 1.0), (2, 2.0), (3, math.nan)):
        one.add(step, value)
    two.add(2, 4.0)
    assert over_seeds([one, two]) == [(1, 1, 1, 1), (2, 3, 2, 4)]
    assert same_but_seed({"seed": 1, "beta": 0.1}) == same_but_seed(
        {"beta": 0.1, "seed": 2, "output_dir": "x"}
    )
    assert same_but_seed({"beta": 0.1}) != same_but_seed({"beta": 0})
