"""Reward models and a judge in whole runs."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests.conftest import wait_until_serving
from tests.rewards.reward_model_makers import save_scorer, save_speaker


@pytest.mark.long
def test_a_function_a_judge_and_two_models_reward_together(
    rlhf, start_tiny, tiny_model, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-of-nobody")
    served = start_tiny(save_speaker(tmp_path / "served", "So 7"), api_key="sk-of-nobody")
    wait_until_serving(served, "sk-of-nobody")
    judge = tmp_path / "judge.yaml"
    judge.write_text(
        f"url: {served.url}/v1\napi_key_env: JUDGE_KEY\nanswer: So (\\d)\nscale: [0, 14]\nmax_tokens: 8\n"
        "rubric: It counts from {start}.\n"
    )
    models = [save_scorer(tmp_path / "scorer"), save_speaker(tmp_path / "speaker", "Reward: 1")]
    flags = {
        "reward_model": models,
        "reward_model_plugin": ["default", "genrm"],
        "reward_timeout": 30,
        "reward_isolation": "process",
    }
    run = rlhf(
        tiny_model,
        max_steps=2,
        reward_funcs=["digits", "judge"],
        judge=judge,
        reward_weights=[1, 2, 0.5, 1],
        log_completions="true",
        **flags,
    )
    assert run.code == 0
    assert {line["rewards/judge/mean"] for line in run.steps} == {0.5}
    assert {line["rewards/speaker/mean"] for line in run.steps} == {1.0}
    assert all(
        line["rewards/scorer/std"] > 0 and line["rewards/scorer/invalid"] == 0 for line in run.steps
    )
    for row in run.lines("completions.jsonl"):
        digits, judged, scored, said = (
            row[f"rewards/{name}"] for name in ("digits", "judge", "scorer", "speaker")
        )
        assert row["reward"] == pytest.approx(digits + 2 * judged + 0.5 * scored + said, abs=1e-6)
    args = json.loads((run.folder / "args.json").read_text())["args"]
    assert args["reward_funcs"] == ["digits", "judge", "scorer", "speaker"]
    assert json.loads(args["judge"])["scale"] == [0, 14]  # the content of the file
    with sqlite3.connect(run.folder / "judge.sqlite") as kept:
        [[question]] = kept.execute("SELECT question FROM answers LIMIT 1").fetchall()
    assert "It counts from " in question
    written = [path for path in run.folder.rglob("*") if path.is_file()]
    assert not [path for path in written if b"sk-of-nobody" in path.read_bytes()]
    assert "sk-of-nobody" not in run.errors


def test_ppo_by_a_reward_model_alone(rlhf, tiny_model: Path, tmp_path: Path) -> None:
    model = save_scorer(tmp_path / "scorer")
    run = rlhf(tiny_model, rlhf_type="ppo", max_steps=2, reward_funcs=[], reward_model=model)
    assert run.code == 0
    assert all(line["rewards/scorer/invalid"] == 0 and line["reward_std"] > 0 for line in run.steps)
