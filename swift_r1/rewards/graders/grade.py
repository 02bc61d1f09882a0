"""What every grader returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grade:
    """`score` is the reward; `formatted` says whether an answer was where it should be, right or wrong."""

    score: float
    formatted: bool
