"""Beside the real ms-swift (`make test-ms-swift`): plugins get its classes, and what they register there is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_r1.plugins.ms_swift import is_installed

REPO = Path(__file__).resolve().parents[2]
FILES = REPO / "tests" / "plugins" / "files"

pytestmark = pytest.mark.skipif(
    not is_installed(), reason="ms-swift is not installed: make test-ms-swift"
)


def run(code: str, cwd: Path) -> None:
    """In a process of its own, from an empty folder."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_its_classes_are_used_and_both_registries_are_read(tmp_path: Path) -> None:
    countdown = REPO / "plugins" / "countdown.py"
    run(
        f"""
import sys
from types import SimpleNamespace
from swift_r1.plugins import load_plugins
from swift_r1.data import load_dataset
from swift_r1.rewards import orms
from swift_r1.rewards.orm import build_reward
format_before = orms["format"]
(plugin,) = load_plugins([{str(countdown)!r}])
assert plugin.orms == ("external_countdown", "countdown_expression"), plugin
assert plugin.datasets == ("countdown", "countdown_expression"), plugin
real = sys.modules["swift.rewards"]
assert "site-packages" in real.__file__ and issubclass(orms["external_countdown"], real.ORM)
assert orms["format"] is format_before  # its built-in ones do not replace ours
rows, _ = load_dataset("countdown#6")
assert len(rows) == 6 and rows[0]["target"] and "Using the numbers" in rows[0]["messages"][-1]["content"]
reward = build_reward("external_countdown", SimpleNamespace(temperature=1.0))
assert reward.needs == ("nums", "target")
columns = {{"nums": [[1, 2]] * 2, "target": [3] * 2}}
assert reward.call(["<answer>1 + 2</answer>", "<answer>4</answer>"], columns) == [1.0, 0.0]
""",
        tmp_path,
    )


def test_all_plugin_files_load_and_the_rows_are_the_same(tmp_path: Path) -> None:
    paths = [str(path) for path in sorted(FILES.glob("*.py"))]
    run(
        f"""
from swift_r1.plugins import load_plugins
from swift_r1.data import load_dataset
from swift_r1.rewards import orms
load_plugins({paths!r})
assert {{"v3_boxed", "v3_short", "v4_everything", "mentions", "half", "meeting"}} <= set(orms)
rows, _ = load_dataset("reach:all")
assert [row["target"] for row in rows] == [5, 9, 6, 20]
assert rows[0]["messages"] == [{{"role": "user", "content": "Using [2, 3], reach 5."}}]
assert rows[3]["messages"][0]["content"].endswith("Multiply.")
""",
        tmp_path,
    )


ROWS = [
    {"question": "1 + 1?", "target": 2},
    {"prompt": "p", "answer": "a", "solution": "s"},
    {"instruction": "i", "input": "n", "output": "o"},
    {"query": "q", "response": "r", "system_prompt": "s"},
    {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
    {"messages": [{"role": "user", "content": "u"}], "solution": "s"},
]


def test_preprocessors_give_what_its_own_give(tmp_path: Path) -> None:
    run(
        f"""
import datasets, swift.dataset as theirs, swift_r1.data as ours
for row in {ROWS!r}:
    mine = dict(ours.AutoPreprocessor()(row))
    rows = datasets.Dataset.from_list([row])
    found = theirs.AutoPreprocessor()(rows, num_proc=1, load_from_cache_file=False, enable_auto_mapping=True)[0]
    turns = [(turn["role"], turn["content"]) for turn in found["messages"]]
    assert [(turn["role"], str(turn["content"])) for turn in mine["messages"]] == [(r, str(c)) for r, c in turns], (
        row, mine, found)
""",
        tmp_path,
    )


def test_rewards_give_what_its_own_give(tmp_path: Path) -> None:
    run(
        """
import itertools, random
from swift.rewards import orms as theirs
from swift_r1.flags import RlhfArguments
from swift_r1.rewards import orms as ours
args = RlhfArguments(cosine_max_len=100, soft_max_length=100, soft_cache_length=20, repetition_n_grams=2)
right = lambda completions, solution, **kwargs: [float(text == wanted) for text, wanted in zip(completions, solution)]
rng = random.Random(0)
pieces = ["<think>", "</think>", "<answer>", "</answer>", "Action:", "Action Input:", " ", "\\n", "x y x y"]
texts = ["".join(rng.choices(pieces, k=rng.randint(0, 9))) for _ in range(3000)]
texts += ["<think>a</think> <answer>b</answer>", "<think>a</think>\\nAction: f Action Input: {}", "a b a b a"]
columns = {"response_token_ids": [[0] * (number % 101) for number in range(len(texts))],
           "solution": [text if number % 2 else "?" for number, text in enumerate(texts)]}
for name in ("format", "react_format", "repetition", "soft_overlong", "cosine"):
    extra = {"accuracy_orm": right} if name == "cosine" else {}
    mine, other = ours[name](args=args, **extra), theirs[name](args=args, **extra)
    values = [mine(texts, **columns), other(texts, **columns)]
    assert len(set(values[1])) > 1, name
    assert max(abs(a - b) for a, b in zip(*values, strict=True)) < 1e-12, name
inputs = ["{}", '{"a": 1}', '{"a": 1, "b": [2]}', '{"b": [2], "a": 1.0}', '{"a": 2}', "x", ""]
calls = [f"Action: {name} Action Input: {words}{end}" for name in "fg" for words in inputs
         for end in ("", "Observation:")] + ["Action: f", "none", ""]
pairs = [(call, wanted) for call in calls for wanted in calls if not wanted.endswith(("x", " ", "Observation:"))]
texts, wanted = map(list, zip(*pairs))
mine, other = ours["toolbench"]()(texts, solution=wanted), theirs["toolbench"]()(texts, solution=wanted)
assert len(set(mine)) == 2 and mine == other, [pair for *pair, a, b in zip(texts, wanted, mine, other) if a != b]
""",
        tmp_path,
    )


def test_losses_and_advantages_are_what_its_own_code_gives(tmp_path: Path) -> None:
    path = REPO / "tests" / "plugins" / "losses_beside_ms_swift.py"
    run(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')", tmp_path)


def test_schedulers_and_environments_of_its_classes_play(tmp_path: Path, tiny_model: Path) -> None:
    plugin = REPO / "tests" / "e2e" / "turns_plugin.py"
    common = [
        *(
            "--rlhf_type",
            "grpo",
            "--model",
            tiny_model,
            "--external_plugins",
            plugin,
            "--dataset",
            "starts#50",
        ),
        *(
            "--per_device_train_batch_size",
            "8",
            "--num_generations",
            "4",
            "--max_completion_length",
            "6",
        ),
        *("--max_steps", "1", "--max_turns", "2", "--report_to", "none", "--add_version", "false"),
    ]
    kinds = {
        "turns": ["--multi_turn_scheduler", "again", "--reward_funcs", "seen"],
        "env": ["--use_gym_env", "true", "--gym_env", "count_digits", "--context_manager", "adds"],
    }
    for name, flags in kinds.items():
        folder = tmp_path / name
        command = [
            sys.executable,
            "-m",
            "swift_r1",
            "rlhf",
            *common,
            *flags,
            "--output_dir",
            folder,
        ]
        environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            env=environment,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        rows = [
            json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()
        ]
        assert len(rows) == 8 and all(row["turns"] == 2 for row in rows)
        steps = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
        assert all(line["rollout/logp_diff"] < 2e-3 for line in steps)
