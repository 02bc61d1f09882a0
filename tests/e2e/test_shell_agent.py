"""`examples/shell_agent`: its tasks, what its model is taught, and two steps of its script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_r1.plugins.environments.base import adapter
from tests.conftest import REPO
from tests.plugins.environments.conftest import Played, played  # noqa: F401  the fixture
from tests.sandboxes.conftest import allows_sandbox  # noqa: F401  the fixture

EXAMPLE = REPO / "examples" / "shell_agent"
sys.path += [str(EXAMPLE), str(REPO / "examples" / "countdown_demo")]

import shell_model  # noqa: E402
import shell_tasks  # noqa: E402
import tiny_model  # noqa: E402


def test_no_held_out_instance_is_in_training() -> None:
    training, held_out = (
        [one for _, one in shell_tasks.all_instances(split)] for split in ("train", "eval")
    )
    seen = {(one.instruction, one.solution) for one in training}
    assert len(seen) == len(training) > 400 and len(held_out) > 100
    assert not any((one.instruction, one.solution) in seen for one in held_out)
    named = [
        {name.rpartition("-")[0] for name, _ in shell_tasks.all_instances(s)}
        for s in ("train", "eval")
    ]
    assert named[0] == named[1] == {task.__name__ for task in shell_tasks.TASKS}
    assert len(named[0]) == 20


def test_each_task_is_solved_by_its_solution_alone(allows_sandbox: None, tmp_path: Path) -> None:  # noqa: F811
    """One instance of each, held out: what `swift check` proves of all."""
    firsts = {}
    for name, one in shell_tasks.all_instances("eval"):
        firsts.setdefault(name.rpartition("-")[0], one)
    for name, one in firsts.items():
        shell_tasks.write_task(one, tmp_path / name)
    proofs = [prove() for prove in adapter(f"harbor:{tmp_path}", {}).provers()]
    assert len(proofs) == 20
    assert [
        proof for proof in proofs if proof.faults or proof.oracle != 1.0 or proof.empty != 0.0
    ] == []


@pytest.mark.long
def test_two_steps(
    rlhf: Callable[..., Any],
    allows_sandbox: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The flags of the script, with small sizes and a model that has learned nothing."""
    tokenizer = shell_model.make_tokenizer()
    tiny_model.save(tiny_model.make_model(0, tokenizer=tokenizer), tmp_path / "model", tokenizer)
    recorder = tmp_path / "swift"
    recorder.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    recorder.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"}
    environ |= {"MODEL": str(tmp_path / "model"), "TASKS": str(tmp_path / "tasks")}
    done = subprocess.run(
        [EXAMPLE / "run.sh"], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    words = done.stdout.splitlines()
    flags: dict[str, Any] = {"reward_funcs": [], "dataset": [], "external_plugins": []}
    for word in words[words.index("rlhf") + 1 :]:
        if word.startswith("--"):
            values = flags[word.removeprefix("--")] = []
        else:
            values.append(word)
    del flags["model"], flags["output_dir"]
    sizes = {
        "max_steps": 2,
        "eval_steps": 2,
        "eval_limit": 2,
        "num_generations": 4,
        "max_completion_length": 8,
    }
    sizes |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    run = rlhf(tmp_path / "model", **flags | sizes)
    assert run.code == 0 and len(run.steps) == 2
    rows = run.lines("completions.jsonl")
    assert len(rows) == 16 and all("failure" not in row for row in rows)
    assert all(line["agent/returned/tests_without_reward"] == 0 for line in run.steps)
    assert {row["step"] for row in run.lines("eval_completions.jsonl")} == {0, 2}
