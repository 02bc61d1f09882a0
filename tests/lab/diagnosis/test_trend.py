"""Whether a reward rises is told with an interval that holds what it promises."""

from __future__ import annotations

import random
from pathlib import Path

from swift_r1.algorithms.rewards import standard_error
from swift_r1.lab.diagnosis.trend import Trend
from tests.lab.diagnosis.test_detectors import diagnosed

GROUPS = 8
SIZE = 8


def round_of(chance: random.Random, level: float) -> dict[str, float]:
    """The metrics of a round of 0/1 rewards, whose prompts differ in how hard they are."""
    groups = []
    for _ in range(GROUPS):
        own = min(1.0, max(0.0, level + chance.uniform(-0.3, 0.3)))
        groups.append([float(chance.random() < own) for _ in range(SIZE)])
    values = [value for group in groups for value in group]
    mean = sum(values) / len(values)
    std = (mean * (1 - mean)) ** 0.5
    error = standard_error(groups)
    silent = sum(len(set(group)) == 1 for group in groups) / GROUPS
    return {
        "loss": 0.0,
        "reward": mean,
        "reward_stderr": error,
        "frac_reward_zero_std": silent,
        "rewards/right/mean": mean,
        "rewards/right/stderr": error,
        "rewards/right/std": std,
    }


def trend(folder: Path, levels: list[float], seed: int = 0, steps: int = 1) -> Trend:
    """The verdict on a run whose rounds have these chances of being right, logged once for each step of a round."""
    chance = random.Random(seed)
    rows = []
    for number, level in enumerate(levels):
        line = round_of(chance, level)
        rows += [{"step": number * steps + step, **line} for step in range(1, steps + 1)]
    verdict = diagnosed(folder, rows, steps).verdict
    assert verdict is not None
    return verdict.reward


def test_what_does_not_change_is_rarely_said_to(tmp_path: Path) -> None:
    """Of 95 % intervals 5 in 100 miss, and of ones that take the errors of 16 groups for known 6."""
    found = [trend(tmp_path / str(seed), [0.4] * 24, seed) for seed in range(200)]
    assert 4 <= sum(one.kind in ("rises", "falls") for one in found) <= 20
    assert {one.kind for one in found} <= {"flat", "rises", "falls"}


def test_what_rises_and_falls_is_said_to(tmp_path: Path) -> None:
    up = [0.3 + 0.3 * number / 23 for number in range(24)]
    found = [trend(tmp_path / f"up{seed}", up, seed) for seed in range(10)]
    assert [one.kind for one in found] == ["rises"] * 10
    assert all(one.low < 0.2 < one.high for one in found)  # two thirds of the way
    down = trend(tmp_path / "down", up[::-1])
    assert down.kind == "falls" and down.change < -0.1
    assert down.text.startswith("reward falls: ")


def test_steps_of_one_round_are_one_observation(tmp_path: Path) -> None:
    once, often = (trend(tmp_path / str(steps), [0.4] * 24, 3, steps) for steps in (1, 4))
    assert once == often


def test_a_run_too_young_to_judge(tmp_path: Path) -> None:
    young = trend(tmp_path / "young", [0.4] * 4)
    assert young.kind == "too early" and young.more_rounds is not None
    assert "cannot be judged yet" in young.text and f"{young.more_rounds} more rounds" in young.text


def test_what_is_learned_is_solved(tmp_path: Path) -> None:
    solved = trend(tmp_path / "solved", [0.3 + min(1.0, number / 8) for number in range(24)])
    assert solved.kind == "solved"
    always = trend(tmp_path / "always", [1.5] * 24)  # from the beginning, and nothing else ever
    assert always.kind == "flat"


def test_an_older_log_has_no_standard_errors(tmp_path: Path) -> None:
    """Then lines that follow each other tell how much they vary."""
    changes = 0
    for seed in range(40):
        chance = random.Random(seed)
        rows = []
        for number in range(1, 25):
            line = {k: v for k, v in round_of(chance, 0.4).items() if "stderr" not in k}
            rows.append({"step": number, **line})
        verdict = diagnosed(tmp_path / str(seed), rows).verdict
        assert verdict is not None
        changes += verdict.reward.kind in ("rises", "falls")
    assert changes <= 6
