"""Which points are hopeless, and which is best."""

from __future__ import annotations

import math

import pytest

from swift_r1.lab.sweep.judging import hopeless, ranking, recent, t_quantile, welch
from swift_r1.record.metric_log import Series


def series(*values: float, every: int = 1) -> Series:
    made = Series()
    for number, value in enumerate(values, 1):
        made.add(number * every, value)
    return made


def test_the_last_steps_count() -> None:
    one = series(1, 2, 3, math.nan, 5)
    assert recent(one, 5, 2) == 5 and recent(one, 5, 3) == 4 and recent(one, 3, 10) == 2
    assert recent(one, 4, 1) == 3  # nothing known there: the last before
    assert math.isnan(recent(one, 0, 5)) and math.isnan(recent(Series(), 3, 5))


def test_a_point_is_set_against_the_best_at_the_same_step() -> None:
    rule = {"over": 2, "after": 3, "behind": 0.5, "below": None}
    rising, slow, late = series(0, 0, 1, 2, 3, 4), series(0, 0, 0.4, 0.8), series(5, 5)
    # At its own step 4 the slow one is at 0.6, the rising one at 1.5; the late one is not there yet.
    assert hopeless({"rising": [rising], "slow": [slow], "late": [late]}, **rule) == {
        "slow": "0.6 at step 4, more than 0.5 behind rising (1.5)"
    }
    assert hopeless({"rising": [rising], "slow": [slow]}, **rule | {"behind": 0.9}) == {}
    assert hopeless({"rising": [rising], "slow": [series(0, 0)]}, **rule) == {}
    # The one that is ahead is looked at where the other has come to.
    assert hopeless({"rising": [rising], "ahead": [series(*[0] * 9)]}, **rule) == {
        "ahead": "0 at step 6, more than 0.5 behind rising (3.5)"
    }
    assert hopeless({"slow": [slow]}, **rule) == {}  # nothing to compare with
    assert hopeless({"slow": [slow]}, **rule | {"behind": None, "below": 0.7}) == {
        "slow": "0.6 at step 4, below 0.7"
    }
    assert (
        hopeless({"none": [series(math.nan, math.nan, math.nan)], "rising": [rising]}, **rule) == {}
    )


def test_seeds_count_together() -> None:
    rule = {"over": 1, "after": 2, "behind": 0.5, "below": None}
    good, lucky, unlucky = series(1, 1, 1), series(1, 1, 1), series(0.2, 0.2)
    assert hopeless({"good": [good], "other": [lucky, unlucky]}, **rule) == {}
    # the third is not there yet
    found = hopeless({"good": [good], "other": [unlucky, unlucky, series(1)]}, **rule)
    assert list(found) == ["other"] and "0.2 at step 2" in found["other"]


def test_students_t() -> None:
    # From the tables of any textbook.
    assert [round(t_quantile(freedom), 3) for freedom in (1, 2, 10)] == [12.706, 4.303, 2.228]


def test_welch() -> None:
    # By hand t = 2.1213 at 4.08 degrees of freedom; the tables have 2.132 at 4 for 0.1.
    assert welch([1, 2, 3], [2, 4, 6, 8]) == pytest.approx(0.1, abs=2e-4)
    assert welch([1, 1], [1, 1]) == 1 and welch([1, 1], [2, 2]) == 0 and welch([1], [2, 3]) == 1


def test_the_best_is_named_with_what_cannot_be_told_from_it() -> None:
    order = ranking({"low": [0.1, 0.11, 0.12], "high": [0.6, 0.62, 0.61], "near": [0.5, 0.65, 0.6]})
    assert [(one.point, one.against_best) for one in order] == [
        ("high", "best"),
        ("near", "not told apart"),
        ("low", "worse"),
    ]
    assert order[0].mean == pytest.approx(0.61) and order[0].half_width == pytest.approx(
        4.303 * 0.01 / math.sqrt(3), 1e-3
    )
    alone = ranking({"a": [0.1], "b": [0.9]})
    assert [(one.point, one.half_width, one.against_best) for one in alone] == [
        ("b", None, "best"),
        ("a", None, "not told apart"),
    ]
