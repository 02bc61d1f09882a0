"""What a run begins with, and what its KL is to: adapters or a checkpoint's weights, and references of their own."""

from __future__ import annotations

import json

import pytest

from swift_r1.cli.main import main


@pytest.mark.long
def test_adapters_and_references(rlhf, tiny_model, tmp_path):
    """Each run's first KL is that between its first weights and its reference, which are those of other runs."""
    flags = {"beta": 0.1, "learning_rate": 1e-2, "max_steps": 1}
    lora = {"train_type": "lora", "use_dora": "true"}

    def run(name, **more):
        done = rlhf(tiny_model, **flags | {"output_dir": tmp_path / name} | more)
        assert done.code == 0
        args = json.loads((done.folder / "args.json").read_text())["args"]
        return done.steps[0]["kl"], next(done.folder.glob("checkpoint-*")), args

    kl, sft, _ = run("sft", **lora, max_steps=2, save_steps=2)
    assert kl == pytest.approx(0, abs=1e-6)
    kl, _, args = run("adapters", **lora, adapters=sft)
    assert kl > 1e-4 and args["target_modules"] != ["all-linear"]
    again, _, args = run("resumed", **lora, resume_from_checkpoint=sft, resume_only_model="true")
    assert again == kl and (args["adapters"], args["resume_from_checkpoint"]) == ([str(sft)], None)
    kl, _, _ = run("both", **lora, adapters=sft, ref_adapters=sft)
    assert kl == pytest.approx(0, abs=1e-6)
    assert (
        main(["merge-lora", "--adapters", str(sft), "--output_dir", str(tmp_path / "merged")]) == 0
    )
    kl, full, _ = run("full", ref_model=tmp_path / "merged")
    assert kl > 1e-4
    _, _, args = run("resumed full", resume_from_checkpoint=full, resume_only_model="true")
    assert (args["model"], args["ref_model"]) == (str(full), str(tiny_model))
