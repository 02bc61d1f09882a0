"""`--save_strategy` and `--eval_strategy`: by steps, by passes over the prompts, and none."""

from __future__ import annotations

import json

import pytest

# 10 prompts, 4 a round of 2 steps: passes end with rounds 3 and 5, which are steps 6 and 10.
SETTINGS = {
    "dataset": "counting#10",
    "max_steps": 12,
    "steps_per_generation": 2,
    "num_generations": 4,
}
EPOCHS = {
    "val_dataset": "counting#2",
    "save_strategy": "epoch",
    "eval_strategy": "epoch",
    "metric_for_best_model": "reward",
}


def saved(folder):
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


def evaluated(folder):
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if any(name.startswith("eval/") for name in line)]


@pytest.mark.long
def test_a_pass_ends_with_a_checkpoint_and_an_evaluation_also_after_a_resume(runs, tmp_path):
    folder = tmp_path / "run"
    links = {"create_checkpoint_symlink": "true"}
    (tmp_path / "signals.json").write_text(json.dumps({"step": 4, "signal": 15, "times": 1}))
    assert (
        runs.run(folder, **SETTINGS, **EPOCHS, **links, resume_from_checkpoint="last").code == 143
    )
    assert saved(folder) == [5] and (folder / "last").resolve().name == "checkpoint-5"
    assert runs.run(folder, **SETTINGS, **EPOCHS, **links, resume_from_checkpoint="last").code == 0
    assert saved(folder) == [5, 6, 10, 12] and evaluated(folder) == [6, 10, 12]
    summary = json.loads((folder / "summary.json").read_text())
    assert (folder / "last").resolve().name == "checkpoint-12"
    assert (folder / "best").readlink().name == f"checkpoint-{summary['best_step']}"


def test_a_run_that_does_not_get_better_ends(runs, tmp_path):
    folder = tmp_path / "run"
    flags = {
        "eval_steps": 1,
        "save_steps": 1,
        "metric_for_best_model": "accuracy",
        "early_stop_interval": 3,
    }
    # its accuracy is always 0
    ended = runs.run(folder, **SETTINGS | {"val_dataset": "counting#2"}, **flags)
    assert (
        ended.code == 0 and "--early_stop_interval: no save since step 1 was better" in ended.said
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["best_step"], saved(folder)) == (4, 1, [1, 2, 3, 4])


@pytest.mark.long
def test_two_processes_agree_on_when(runs, tmp_path):
    folder = tmp_path / "run"
    flags = EPOCHS | {
        "metric_for_best_model": "accuracy",
        "early_stop_interval": 1,
        "deepspeed": "zero0",
    }
    flags["per_device_train_batch_size"] = 4
    assert runs.run(folder, processes=2, **SETTINGS, **flags).code == 0
    assert saved(folder) == evaluated(folder) == [6, 10]  # the second is not better


def test_no_checkpoint_but_the_last(runs, tmp_path):
    folder = tmp_path / "run"
    flags = {"save_strategy": "no", "eval_strategy": "no", "max_steps": 3}
    assert runs.run(folder, **SETTINGS | flags).code == 0
    assert saved(folder) == [3] and evaluated(folder) == []
    lines = [
        json.loads(line)["step"] for line in (folder / "logging.jsonl").read_text().splitlines()
    ]
    assert lines == [1, 2, 3]
