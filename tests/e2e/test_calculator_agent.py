"""`examples/calculator_agent`: its problems, its model's words, and two steps of the runs of its script."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from swift_r1.flags import parse_arguments
from swift_r1.flags.rlhf import CheckArguments
from swift_r1.launch.checks.run import run_checks
from tests.conftest import REPO

EXAMPLE = REPO / "examples" / "calculator_agent"
sys.path += [str(EXAMPLE), str(REPO / "examples" / "countdown_demo")]

import arithmetic  # noqa: E402
import calculator_model  # noqa: E402
import tiny_model  # noqa: E402


def drawn(split: str, count: int, seed: int = 0) -> list[arithmetic.Problem]:
    return list(islice(arithmetic.problems(split, random.Random(seed)), count))


def test_no_held_out_product_is_in_training() -> None:
    training, held_out = (
        {tuple(sorted((p.left, p.right))) for p in drawn(one, 5000)} for one in ("train", "eval")
    )
    assert len(training) > 2000 and len(held_out) > 300 and not training & held_out
    for problem in drawn("eval", 100):
        assert problem.answer == problem.left * problem.right + int(f"{problem.way}{problem.other}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "calculator"
    tokenizer = calculator_model.make_tokenizer()
    tiny_model.save(tiny_model.make_model(0, tokenizer=tokenizer), folder, tokenizer)
    return folder


def words_of(script: str, way: str, tmp_path: Path) -> list[str]:
    """The flags with which the script runs `swift rlhf`, as words."""
    recorder = tmp_path / "bin" / "swift"
    recorder.parent.mkdir()
    # One write each: a server and a trainer start beside each other.
    write = "os.write(1, (json.dumps(sys.argv[1:]) + '\\n').encode())"
    recorder.write_text(f"#!{sys.executable}\nimport json, os, sys\n{write}\n")
    recorder.chmod(0o755)
    environ = os.environ | {
        "PATH": f"{recorder.parent}:{os.environ['PATH']}",
        "WAY": way,
        "MODEL": str(tmp_path),
    }
    done = subprocess.run(
        [EXAMPLE / script], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    (words,) = (
        words for line in done.stdout.splitlines() if (words := json.loads(line))[0] == "rlhf"
    )
    return words[1:]


@pytest.mark.parametrize(
    ("script", "way"),
    [
        ("run.sh", "tools"),
        pytest.param("run.sh", "agent", marks=pytest.mark.long),
        pytest.param("run.sh", "command", marks=pytest.mark.long),
        ("smollm2.sh", ""),
    ],
)
def test_scripts_pass_swift_check(
    script: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    # the command is `python agent.py`
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    args = parse_arguments(CheckArguments, words_of(script, way, tmp_path), {})
    report = run_checks(replace(args, model="", reward_num_workers=1, num_rows=2))
    assert report.ok, report.faults + [
        problem for one in report.rewards for problem in one.problems
    ]
    assert all(one.rows == 2 for one in report.datasets)
    # an episode's reward is its agent's
    assert bool(report.rewards) == (way not in ("agent", "command"))


@pytest.mark.long
@pytest.mark.parametrize("way", ["agent", "tools"])
def test_two_steps(rlhf: Callable[..., Any], model: Path, way: str, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"reward_funcs": []}  # that of the fixture; an agent has its own
    for word in words_of("run.sh", way, tmp_path):
        if word.startswith("--"):
            values = flags[word.removeprefix("--")] = []
        else:
            values.append(word)
    del flags["model"], flags["output_dir"]
    flags["external_plugins"] = [str(REPO / one) for one in flags["external_plugins"]]
    sizes = {
        "max_steps": 2,
        "eval_steps": 2,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
    }
    run = rlhf(
        model,
        **flags | sizes | {"num_generations": 8, "eval_limit": 2, "max_completion_length": 10},
    )
    assert run.code == 0 and len(run.steps) == 2
    rows = run.lines("eval_completions.jsonl")
    assert {row["step"] for row in rows} == {0, 2}
    assert all(row["prompt"].endswith(f"{row['problem']}\n") for row in rows)
    assert {row["reward"] for row in rows} <= {0.0, 1.0} and all(
        "failure" not in row for row in rows
    )
