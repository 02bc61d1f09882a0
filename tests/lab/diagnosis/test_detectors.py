"""Each detector on logs that were made up: it speaks where its condition has held for its rounds, and else not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from swift_r1.lab.diagnosis.past import DETECTORS, Detector, Sign
from swift_r1.lab.diagnosis.watch import Diagnosis
from tests.lab.runs.made import write_rows

ROOT = Path(__file__).parents[3]
HEALTHY: Mapping[str, float] = {
    "loss": 0.0,
    "reward": 0.4,
    "frac_reward_zero_std": 0.3,
    "rewards/right/mean": 0.4,
    "rewards/right/std": 0.49,
    "rewards/right/invalid": 0.0,
    "entropy": 0.5,
    "grad_norm": 0.2,
    "learning_rate": 1e-6,
    "ratio": 1.0,
    "clip_ratio/low": 0.01,
    "clip_ratio/high": 0.01,
    "kl": 0.02,
    "rollout/logp_diff": 1e-3,
    "completions/mean_length": 200.0,
    "completions/clipped_ratio": 0.05,
    "completions/repetition": 0.1,
    "completions/foreign_letters": 0.01,
    "prompts/repeated": 0.0,
    "weights/changed": 3e-3,
    "memory/host_gib": 4.0,
    "time/rank_slowdown": 1.05,
    "time/slowest_rank": 1.0,
    "time/server_slowdown": 1.1,
    "time/slowest_server": 0.0,
    "time/reward": 0.2,
    "time/step": 10.0,
}


def accuracy(step: int, value: float) -> dict[str, float]:
    return {
        f"eval/a/{name}": value + more
        for name, more in (
            ("accuracy", 0),
            ("avg@4", 0),
            ("avg@4/low", -0.03),
            ("avg@4/high", 0.03),
        )
    }


def changing(first: float, then: float) -> Callable[[int], float]:
    """From round 6 on it is otherwise."""
    return lambda number: first if number < 6 else then


FAULTS: Mapping[str, Mapping[str, Any]] = {
    "repetition": {"completions/repetition": changing(0.1, 0.6)},
    "language broken": {"completions/foreign_letters": changing(0.01, 0.3)},
    "template broken": {"completions/clipped_ratio": 1.0},
    "length explosion": {"completions/mean_length": changing(200, 500)},
    "truncation": {"completions/clipped_ratio": changing(0.05, 0.4)},
    "data repeated": {"prompts/repeated": 0.2},
    "rewards invalid": {"rewards/right/invalid": changing(0.0, 0.05)},
    "rewards saturated": {
        "frac_reward_zero_std": 0.95,
        "rewards/right/mean": 0.99,
        "rewards/right/std": 0.1,
    },
    "entropy collapse": {"entropy": changing(0.5, 0.02)},
    "no signal": {
        "frac_reward_zero_std": 1.0,
        "rewards/right/mean": 0.0,
        "rewards/right/std": 0.0,
        "reward": 0.0,
    },
    "engine mismatch": {"rollout/logp_diff": changing(1e-3, 0.2)},
    "ratios off": {"clip_ratio/low": changing(0.0, 0.4)},
    "KL running off": {"kl": changing(0.01, 3.0)},
    "weights not moving": {"weights/changed": 1e-5},
    "memory creeping": {"memory/host_gib": lambda number: 4 + 0.05 * number},
    "slow rank": {"time/rank_slowdown": 2.0},
    "slow server": {"time/server_slowdown": 2.0},
    "slow reward": {"time/reward": 6.0},
}


def rows_of(
    fault: Mapping[str, Any], rounds: int, steps: int = 1, every: int = 1
) -> list[dict[str, float]]:
    """Lines of so many rounds of so many steps, one every so many steps, each the mean of its steps."""
    found = []
    for last in range(every, rounds * steps + 1, every):
        numbers = [(step - 1) // steps + 1 for step in range(last - every + 1, last + 1)]
        line = dict(HEALTHY)
        for name, value in fault.items():
            line[name] = (
                math.fsum(value(one) if callable(value) else value for one in numbers) / every
            )
        found.append({"step": last, **line})
    return found


def diagnosed(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    steps: int = 1,
    answered: bool = False,
    **args: Any,
) -> Diagnosis:
    folder.mkdir(exist_ok=True)
    plan = {
        "answered": answered,
        "optimizer_steps_per_round": steps,
        "prompts_per_round": 32,
        "prompts_per_epoch": 10_000,
    }
    (folder / "args.json").write_text(
        json.dumps(
            {
                "args": {
                    "reward_funcs": ["right"],
                    "torch_dtype": "bfloat16",
                    "learning_rate": 1e-6,
                }
                | args,
                "plan": plan,
            }
        )
    )
    write_rows(folder / "logging.jsonl", rows)
    found = Diagnosis(folder)
    found.refresh()
    assert found.problems == []
    return found


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(("steps", "every"), [(1, 1), (4, 1), (1, 5), (2, 8)])
def test_each_is_found_alone_and_not_before_its_time(
    tmp_path: Path, name: str, steps: int, every: int
) -> None:
    """Whatever the steps of a round and the steps between two lines."""
    [detector] = [one for one in DETECTORS if one.name == name]
    found = diagnosed(tmp_path, rows_of(FAULTS[name], 48, steps, every), steps)
    assert list(found.findings) == [name]
    finding = found.findings[name]
    begin = 5 if callable(next(iter(FAULTS[name].values()))) and name != "memory creeping" else 0
    # of a mean
    earliest = (
        begin + (2 if name in ("rewards invalid", "ratios off") else detector.rounds)
    ) * steps
    assert earliest <= finding.steps[1] <= earliest + (3 + 8) * steps + 2 * every
    assert finding.evidence and finding.advice and finding.numbers


def test_nothing_is_found_in_a_healthy_run(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, rows_of({}, 60))
    assert found.findings == {} and found.not_judged == ["evaluation falling"]


def test_a_short_run_says_what_it_is_too_early_for(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, rows_of(FAULTS["no signal"], 2, steps=4), steps=4)
    assert found.findings == {} and found.rounds == 2
    assert {"no signal", "repetition", "memory creeping"} <= set(found.too_early)
    assert {"evaluation falling", *found.not_judged}.isdisjoint(found.too_early)
    assert diagnosed(tmp_path / "long", rows_of({}, 60)).too_early == []


def test_an_evaluation_that_falls_while_the_reward_rises(tmp_path: Path) -> None:
    def run(folder: str, values: Sequence[float], slope: float) -> list[str]:
        rows = rows_of({"reward": lambda number: 0.4 + slope * number}, 40)
        for number, value in enumerate(values):
            rows.insert(
                rows.index(next(row for row in rows if row["step"] == 10 * number + 10)) + 1,
                {"step": 10 * number + 10, **accuracy(0, value)},
            )
        return list(diagnosed(tmp_path / folder, rows).findings)

    assert run("falls", [0.5, 0.4, 0.35], 0.01) == ["evaluation falling"]
    assert run("falls once", [0.5, 0.5, 0.35], 0.01) == []
    assert run("within the interval", [0.5, 0.46, 0.46], 0.01) == []
    assert run("both fall", [0.5, 0.4, 0.35], -0.005) == []


@pytest.mark.parametrize(
    ("name", "more"),
    [
        # it is being learned
        ("entropy collapse", {"rewards/right/mean": lambda number: 0.4 + 0.01 * number}),
        ("length explosion", {"rewards/right/mean": lambda number: 0.4 + 0.01 * number}),
        ("weights not moving", {"grad_norm": 0.0}),
        ("weights not moving", {"learning_rate": lambda number: 1e-8 * number}),  # a warm-up
        ("memory creeping", {"completions/mean_length": lambda number: 200 + 4 * number}),
        ("slow rank", {"time/slowest_rank": lambda number: number % 2}),
    ],
)
def test_what_explains_it_otherwise(tmp_path: Path, name: str, more: Mapping[str, Any]) -> None:
    assert diagnosed(tmp_path, rows_of({**FAULTS[name], **more}, 48)).findings == {}


def test_a_cause_is_said_and_not_what_follows_from_it(tmp_path: Path) -> None:
    assert list(
        diagnosed(
            tmp_path,
            rows_of(
                {**FAULTS["repetition"], **FAULTS["truncation"], **FAULTS["length explosion"]}, 30
            ),
        ).findings
    ) == ["repetition"]


def test_dynamic_sampling_and_a_critic(tmp_path: Path) -> None:
    """Groups that were replaced are not trained on; a critic compares groups with each other."""
    fault = {"frac_reward_zero_std": 1.0}
    assert (
        diagnosed(
            tmp_path / "a", rows_of({**fault, "dynamic_sample/kept_without_signal": 1.0}, 20)
        ).findings
        == {}
    )
    assert list(
        diagnosed(
            tmp_path / "b", rows_of({**fault, "dynamic_sample/kept_without_signal": 31.0}, 20)
        ).findings
    ) == ["no signal"]
    assert diagnosed(tmp_path / "c", rows_of(fault, 20), rlhf_type="ppo").findings == {}


def test_a_task_whose_reward_never_comes(tmp_path: Path) -> None:
    """While others differ; one of those that is always given, as a format may be, is no fault."""
    never = {"rewards/right/mean": 0.0, "rewards/right/std": 0.0}
    rows = rows_of(never | {"rewards/other/mean": 0.5, "rewards/other/std": 0.5}, 20)
    found = diagnosed(tmp_path / "never", rows).findings
    assert (
        list(found) == ["no signal"]
        and "reward right was 0 for every completion" in found["no signal"].evidence
    )
    rows = rows_of(never | {"rewards/right/mean": lambda number: 0.1 * (number == 1)}, 20)
    assert diagnosed(tmp_path / "once", rows).findings == {}
    rows = rows_of({"rewards/other/mean": 1.0, "rewards/other/std": 0.0}, 20)
    assert diagnosed(tmp_path / "format", rows).findings == {}


def test_values_that_are_not_known_are_no_evidence(tmp_path: Path) -> None:
    """Whichever of a round's metrics are null: no detector fails."""
    names = [*HEALTHY, "rewards/format/mean", "rewards/format/std", *accuracy(0, 0.5)]
    for seed in range(60):
        chance = random.Random(seed)
        levels = {name: chance.choice([None, None, 0.0, 1e-5, 0.5, 1.0, 5.0]) for name in names}
        rows = [
            {"step": step}
            | {name: value if chance.random() < 0.9 else None for name, value in levels.items()}
            for step in range(1, 40)
        ]
        diagnosed(tmp_path / str(seed), rows)


def test_a_detector_that_fails_is_a_problem_and_the_others_go_on(tmp_path: Path) -> None:
    def broken(_past: Any, _rounds: int) -> Sign | None:
        raise ZeroDivisionError("of nothing")

    write_rows(tmp_path / "logging.jsonl", rows_of(FAULTS["KL running off"], 30))
    found = Diagnosis(tmp_path, [Detector("broken", 1, ["loss"], (), broken), *DETECTORS])
    found.refresh()
    assert list(found.findings) == ["KL running off"]
    [problem] = [one for one in found.problems if "detector" in one]
    assert problem.startswith("the detector of 'broken' failed: ZeroDivisionError: of nothing (")


def test_what_is_saturated_is_what_is_trained(tmp_path: Path) -> None:
    """A function of weight 0 that watches does not hide it, and a small one is not it."""
    groups = {"frac_reward_zero_std": 1.0, "rewards/other/mean": 1.0, "rewards/other/std": 0.0}
    rows, names = rows_of(FAULTS["no signal"] | groups, 20), ["right", "other"]
    found = diagnosed(tmp_path / "a", rows, reward_funcs=names, reward_weights=[0, 1]).findings
    assert list(found) == ["rewards saturated"]
    assert (
        "reward other is 1 for nearly all completions, and right 0"
        in found["rewards saturated"].evidence
    )
    found = diagnosed(tmp_path / "b", rows, reward_funcs=names, reward_weights=[1, 0.1]).findings
    assert "no signal" in found
