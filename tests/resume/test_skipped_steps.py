"""A step whose loss or gradient is not finite updates nothing, is written down, and ends the run only in a row."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.resume.conftest import happened

SETTINGS = {"max_steps": 5, "save_steps": 1, "logging_steps": 1, "num_generations": 8}


def state(folder, step):
    files = sorted((folder / f"checkpoint-{step}" / "state").glob("optimizer-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        pytest.param({"processes": 2, "deepspeed": "zero2"}, marks=pytest.mark.long),
        pytest.param({"processes": 2, "deepspeed": "zero3"}, marks=pytest.mark.long),
    ],
)
def test_a_step_that_is_not_finite_updates_nothing(runs, tmp_path, ranks):
    folder = tmp_path / "run"
    batch = 8 // ranks.get("processes", 1)
    ended = runs.run(
        folder, forget="finite:3", per_device_train_batch_size=batch, **SETTINGS, **ranks
    )
    assert (
        ended.code == 0 and "step 3 is skipped: grad_norm not finite; its batch is in" in ended.said
    )
    before, skipped, after = state(folder, 2), state(folder, 3), state(folder, 4)
    assert all(torch.equal(before[name], skipped[name]) for name in before)
    assert any(not torch.equal(skipped[name], after[name]) for name in after)
    assert after["updates"] == skipped["updates"] + 1 == 3
    assert all(tensor.isfinite().all() for tensor in after.values())
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0, 0, 1, 0, 0]
    aside = load_file(folder / "skipped" / "step-3.safetensors")
    assert aside["samples"].tolist() == list(range(8)) and aside["advantages"].shape == (8,)
    assert len(aside["token_ids"]) == int(
        (aside["prompt_lengths"] + aside["completion_lengths"]).sum()
    )


def test_too_many_in_a_row_end_the_run(runs, tmp_path):
    ended = runs.run(tmp_path / "run", forget="finite:1,3,4", max_skipped_steps=1, **SETTINGS)
    assert ended.code == 5
    assert (
        "not finite at step 4, 2 steps in a row were skipped (--max_skipped_steps 1)" in ended.said
    )
    marks = happened(tmp_path / "run")
    assert [(kind, step) for kind, step, _ in marks if kind != "saved"] == [
        *(("started", 0), ("skipped", 1), ("skipped", 3), ("skipped", 4), ("failed", 4))
    ]
    assert "2 steps in a row were skipped" in marks[-1][2]
