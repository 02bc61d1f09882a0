"""What rising learning rates tell, on runs whose answer is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swift_r1.training.rate_finder import RatePoint, RisingRate, rate_range, verdict


def rising(breaks_at: float, steps: int = 40, noise: float = 1e-6) -> list[RatePoint]:
    """Rates from 1e-8 to 1e-2, whose KL is that of the rate squared and 0.1 at `breaks_at`."""
    schedule = RisingRate(1e-8, 1e-2, steps)
    points = []
    for _ in range(steps):
        kl = noise + 0.1 * (schedule.value / breaks_at) ** 2
        points.append(RatePoint(schedule.value, -0.1, 1.0, kl, 1 / (1 + kl)))
        schedule.advance()
    assert points[0].rate == 1e-8 and points[-1].rate == pytest.approx(1e-2)
    return points


def test_the_rate_is_a_tenth_of_the_one_that_breaks() -> None:
    points = rising(1e-4)
    found = rate_range(points)
    step = points[1].rate / points[0].rate
    assert found.breaks is not None and 1e-4 / step < found.breaks < 1e-4 * step
    assert found.proposed == found.breaks / 10
    # where the KL is 1e-5 beyond that of the quiet steps: a hundredth of 1e-4
    assert found.moves is not None and 0.9e-6 < found.moves < 1.1e-6 * step
    assert f"--learning_rate {found.proposed:.1e} is proposed" in verdict(found, points)


def test_a_rate_at_which_nothing_moves_is_not_proposed() -> None:
    """The quiet KL is that of a run that moved itself: 0.02, so the policy is seen to move late."""
    points = rising(1e-4, noise=0.02)
    found = rate_range(points)
    assert found.moves is not None and found.breaks is not None
    assert found.moves > found.breaks / 10
    assert found.proposed == pytest.approx(math.sqrt(found.moves * found.breaks))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loss": math.nan}, "not finite"),
        ({"grad_norm": math.inf}, "not finite"),
        ({"grad_norm": 11.0}, "gradient 11 times as large"),
        ({"ess": 0.4}, "effective sample size 0.4"),
        ({"kl": math.nan}, "KL nan"),
    ],
)
def test_other_signs_of_a_rate_that_is_too_high(change: dict[str, float], why: str) -> None:
    points = rising(1.0)
    points[30] = replace(points[30], **change)
    found = rate_range(points)
    assert found.breaks == points[30].rate and why in found.why
    assert found.proposed == points[30].rate / 10


def test_the_end_of_the_range() -> None:
    points = rising(1.0)
    points[3] = replace(points[3], grad_norm=0.0)  # groups without signal
    assert "nothing breaks up to 1.0e-02: give a higher" in verdict(rate_range(points), points)
    points = [replace(one, kl=0.2) for one in points]
    assert "broken from the lowest rate, 1.0e-08" in verdict(rate_range(points), points)
