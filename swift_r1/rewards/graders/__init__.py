"""Graders: pure functions from a completion to a `Grade`. No model, no torch, no exception on any completion."""

from swift_r1.rewards.graders.countdown import grade_countdown
from swift_r1.rewards.graders.grade import Grade

__all__ = ["Grade", "grade_countdown"]
