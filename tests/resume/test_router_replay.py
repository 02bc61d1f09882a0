"""A round whose experts are replayed is gone on with in its middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.families import save_family
from tests.resume.conftest import HERE, Runs
from tests.resume.test_exact_resume import cut_back

FLAGS = {
    "external_plugins": [HERE / "noisy_plugin.py", HERE.parent / "e2e" / "noisy_routes_plugin.py"],
    "max_steps": 4,
    "num_iterations": 2,
    "save_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "torch_dtype": "float32",
}
TWO_RANKS = {"processes": 2, "per_device_train_batch_size": 4}


def differences(folder: Path) -> list[float]:
    """Of engine and trainer before each of the two rounds."""
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [line["rollout/logp_diff"] for line in lines if "loss" in line][::2]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    return Runs(save_family(tmp_path_factory.mktemp("mixture"), "qwen3_moe"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("R3", {}),
        ("R2", {}),
        ("R3", TWO_RANKS | {"deepspeed": "zero3"}),
        ("R3", TWO_RANKS | {"sequence_parallel_size": 2}),
    ],
)
def test_a_round_has_its_experts_after_a_resume(mixtures, same, tmp_path, mode, more):
    flags = FLAGS | more | {"router_replay_mode": mode}
    whole = tmp_path / "whole"
    assert mixtures.run(whole, **flags).code == 0
    assert [one < 1e-5 for one in differences(whole)] == [mode == "R3"] * 2
    folder = cut_back(whole, tmp_path / "run", 3)
    assert mixtures.run(folder, resume_from_checkpoint="last", **flags).code == 0
    same(whole, folder)
