"""Runs whose rows have images, killed between and within rounds: they equal the uninterrupted one, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from transformers import AutoModelForMultimodalLM

from swift_r1.models.multimodal import part_of_model
from tests.resume.test_exact_resume import cut_back
from tests.vision import write_tiny

HERE = Path(__file__).parent
PICTURES = {
    # Four optimizer steps a round, and checkpoints in the middle of rounds.
    "external_plugins": [HERE / "noisy_plugin.py", HERE.parent / "e2e/pictures_plugin.py"],
    "dataset": "pictures",
    "max_steps": 7,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "save_steps": 3,
    "eval_steps": 5,
    "eval_limit": 4,
    "beta": 0.05,
    "torch_dtype": "float32",
    "use_vllm": "false",
    "freeze_vit": "false",
    "freeze_aligner": "false",
}


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory):
    """The flags of the run, its folder, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("pictures")
    flags = PICTURES | {"model": write_tiny("qwen2_5_vl", folder / "model")}
    started = time.monotonic()
    assert runs.run(folder / "run", **flags).code == 0
    return flags, folder / "run", time.monotonic() - started


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.long), 6])
def test_one_that_was_cut_within_a_round(runs, whole, same, tmp_path, step):
    """Its images are read from the checkpoint alone: of the files that the rows name the round needs none."""
    flags, expected, _ = whole
    folder = cut_back(expected, tmp_path / "run", step)
    assert runs.run(folder, resume_from_checkpoint="last", **flags).code == 0
    same(expected, folder)


def test_a_checkpoint_is_a_model_whose_tower_was_trained(whole):
    """And transformers reads all of it."""
    flags, folder, _ = whole
    before, after = (
        AutoModelForMultimodalLM.from_pretrained(path, output_loading_info=True)
        for path in (flags["model"], folder / "checkpoint-7")
    )
    for _, info in (before, after):
        assert not info["missing_keys"] and not info["unexpected_keys"]
    weights = after[0].state_dict()
    moved = {name for name, one in before[0].state_dict().items() if not one.equal(weights[name])}
    assert {part_of_model(name) for name in moved} == {"llm", "vit", "aligner"}
