"""Graders: pure functions from a completion to a `Grade`. No model, no torch, no exception on any completion."""

from swift_r1.rewards.graders.answers import Grade
from swift_r1.rewards.graders.countdown import grade_countdown
from swift_r1.rewards.graders.gsm8k import grade_gsm8k
from swift_r1.rewards.graders.math import grade_math

__all__ = ["Grade", "grade_countdown", "grade_gsm8k", "grade_math"]
