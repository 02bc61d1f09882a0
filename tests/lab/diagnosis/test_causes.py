"""Each cause on logs that were made up: it is named where its measurement says so, before what it brings about, and not
where the reward rises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swift_r1.lab.diagnosis.verdict import Verdict
from tests.lab.diagnosis.test_detectors import diagnosed, rows_of

FLAT = {
    "reward_stderr": 0.02,
    "rewards/right/stderr": 0.02,
    "policy/moved": lambda number: 0.03 * number**0.5,
    "advantages/mean_size": 0.8,
    "completions/repeated": 0.05,
    "recheck/right/changed": 0.0,
    "recheck/right/noise": 0.0,
    "recheck/right/reordered": 0.0,
    "recheck/right/own": 0.35,
    "recheck/right/other": 0.02,
}
CAUSES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "reward is noise": ({"recheck/right/changed": 0.4, "recheck/right/noise": 0.8}, {}),
    "answers of other rows": ({"recheck/right/own": 0.02, "recheck/right/other": 0.04}, {}),
    "reward constant": (
        {"rewards/right/std": 0.0, "rewards/right/mean": 0.4, "frac_reward_zero_std": 1.0},
        {},
    ),
    "no variety": (
        {"completions/repeated": 0.6, "frac_reward_zero_std": 0.6, "entropy": 0.01},
        {"temperature": 0.05},
    ),
    "sampling differs from training": (
        {"rollout/logp_diff": 0.1},
        {"torch_dtype": "float32"},
    ),
    "no signal": ({"frac_reward_zero_std": 0.8}, {}),
    "policy does not move": ({"policy/moved": 1e-5}, {"learning_rate": 1e-9}),
    "updates too large": ({"policy/moved": lambda number: 0.3 * number}, {}),
    "truncation": ({"completions/clipped_ratio": 0.6}, {}),
    "too few completions": ({"reward_stderr": 0.08}, {}),
}


def verdict(folder: Path, fault: Mapping[str, Any], rounds: int = 24, **args: Any) -> Verdict:
    found = diagnosed(folder, rows_of({**FLAT, **fault}, rounds), **args).verdict
    assert found is not None
    return found


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_cause(name: str, tmp_path: Path) -> None:
    fault, args = CAUSES[name]
    found = verdict(tmp_path / "flat", fault, **args)
    assert found.causes[0].name == name, [cause.name for cause in found.causes]
    rising = {name: lambda number: 0.2 + 0.02 * number for name in ("reward", "rewards/right/mean")}
    assert verdict(tmp_path / "rising", {**fault, **rising}, **args).causes == []


def test_nothing_is_claimed_without_a_measurement(tmp_path: Path) -> None:
    found = verdict(tmp_path, {})
    assert found.reward.kind == "flat"
    assert [cause.name for cause in found.causes] in ([], ["too few completions"])


def test_a_policy_that_is_held_back_stands_still(tmp_path: Path) -> None:
    """It has moved in the first round, and since then no further."""
    held = {"policy/moved": 0.03, "kl/pull": 0.2}
    [first, *_] = verdict(tmp_path / "held", held, beta=5.0).causes
    assert first.name == "policy does not move" and first.advice.startswith("--beta 0")
    names = [cause.name for cause in verdict(tmp_path / "free", {"kl/pull": 0.2}).causes]
    assert "policy does not move" not in names


@pytest.mark.parametrize("end", ["before", "after"])
def test_columns_of_the_row_beside(end: str, tmp_path: Path) -> None:
    shifted = {"recheck/right/own": 0.0, "recheck/right/other": 0.0, f"recheck/right/{end}": 0.3}
    found = verdict(tmp_path, shifted)
    assert found.causes[0].name == "answers of other rows"
    assert f"the row {end} their own" in found.causes[0].evidence


def test_another_reward_rises_than_the_one_that_matters(tmp_path: Path) -> None:
    rising = {
        "reward": lambda number: 0.2 + 0.02 * number,
        "rewards/long/mean": lambda number: 0.2 + 0.02 * number,
        "rewards/long/stderr": 0.02,
        "rewards/long/std": 0.5,
    }
    found = verdict(tmp_path, rising, reward_funcs=["right", "long"], reward_weights=[0.1, 1.0])
    assert found.reward.kind == "rises"
    assert [cause.name for cause in found.causes] == ["beside the task"]
    assert "reward right is flat" in found.causes[0].evidence


def test_causes_stand_before_what_they_bring_about(tmp_path: Path) -> None:
    fault = {
        "recheck/right/noise": 0.9,
        "recheck/right/changed": 0.5,
        "frac_reward_zero_std": 0.75,
        "policy/moved": 1e-5,
    }
    names = [cause.name for cause in verdict(tmp_path, fault).causes]
    assert names == ["reward is noise", "no signal", "policy does not move"]


@pytest.mark.parametrize(
    "args", [{"advantage_estimator": "reinforce_plus_plus"}, {"rlhf_type": "ppo"}]
)
def test_groups_of_one_are_equal_and_teach(tmp_path: Path, args: Mapping[str, Any]) -> None:
    """Where a completion is compared with all others of the step, equal rewards within a group are no fault."""
    found = verdict(tmp_path, {"frac_reward_zero_std": 1.0}, **args)
    assert {cause.name for cause in found.causes} <= {"too few completions"}


def test_a_reward_that_is_measured_from_a_mean(tmp_path: Path) -> None:
    found = verdict(tmp_path, {"reward": 0.0, "recheck/right/own": 0.3, "recheck/right/other": 0.5})
    assert [cause.name for cause in found.causes] == ["reward is relative"]
