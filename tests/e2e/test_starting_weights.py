"""What a run begins with, and what its KL is to: adapters or a checkpoint's weights, and references of their own."""

from __future__ import annotations

import json

import pytest


def test_adapters_and_references(rlhf, tiny_model, tmp_path):
    """Each run's first KL is that between its first weights and its reference, which are those of other runs."""
    flags = {"beta": 0.1, "learning_rate": 1e-2, "max_steps": 2, "train_type": "lora", "use_dora": "true"}

    def first_kl(name, model=tiny_model, **more):
        run = rlhf(model, **flags | {"output_dir": tmp_path / name, "lora_dropout": 0.1} | more)
        assert run.code == 0
        return run.steps[0]["kl"], run.folder / "checkpoint-2", json.loads((run.folder / "args.json").read_text())

    kl, sft, _ = first_kl("sft")
    assert kl == pytest.approx(0, abs=1e-6)
    moved, again, args = first_kl("adapters", adapters=sft)
    assert moved > 1e-4 and args["args"]["target_modules"] != ["all-linear"]
    kl, _, args = first_kl("resumed", resume_from_checkpoint=sft, resume_only_model="true", max_steps=1)
    assert kl == pytest.approx(moved, rel=0.2) and args["args"]["adapters"] == [str(sft)]
    kl, _, _ = first_kl("both", adapters=sft, ref_adapters=sft, max_steps=1, use_dora="true")
    assert kl == pytest.approx(0, abs=1e-6)
    merged = {"train_type": "full", "ref_model": tiny_model, "lora_dropout": 0}
