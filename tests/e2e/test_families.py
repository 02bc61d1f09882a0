"""Two steps of `swift rlhf` in float32 for each family of models: the whole matrix, of which docs/models.md has the
table (`pytest -m long tests/e2e/test_families.py -rA` prints what it is made from)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.families import FAMILIES, save_family

pytestmark = pytest.mark.long

TWO_STEPS = {
    "torch_dtype": "float32",
    "max_steps": 2,
    "learning_rate": 1e-3,
    "beta": 0.1,
    "max_completion_length": 24,
    "save_steps": 2,
}
SERVED = sorted(set(FAMILIES))


def reloaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("train_type", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_embedded_engine(rlhf, tmp_path, family, train_type):
    model = save_family(tmp_path / "model", family)
    run = rlhf(model, train_type=train_type, use_vllm="false", **TWO_STEPS)
    assert run.code == 0
    differences = [line["rollout/logp_diff"] for line in run.steps]
    print(f"{family} {train_type}: rollout/logp_diff {max(differences):.1e}")
    assert len(differences) == 2 and max(differences) < 1e-4
    before, after = reloaded(model), reloaded(run.folder / "checkpoint-2")
    trained = {name for name, tensor in before.items() if not torch.equal(tensor, after.get(name, tensor))}
    if train_type == "lora":
        adapters = load_file(run.folder / "checkpoint-2" / "adapter_model.safetensors")
        assert not trained and any(tensor.any() for name, tensor in adapters.items() if ".lora_B." in name)
        return
    assert before.keys() == after.keys() and len(trained) > len(before) / 2
    # What is in the file is what a checkpoint of the family holds, buffers too.
    assert (
        load_file(model / "model.safetensors").keys()
        == load_file(run.folder / "checkpoint-2" / "model.safetensors").keys()
    )
    for name, tensor in before.items():
        assert "e_score_correction_bias" not in name or torch.equal(tensor, after[name])


@pytest.mark.parametrize("family", SERVED)
def test_through_vllm(rlhf, launch_server, tmp_path, family):
    model = save_family(tmp_path / "model", family)
    server = launch_server(model, torch_dtype="float32", max_model_len=256)
    try:
        run = rlhf(model, use_vllm="true", vllm_server_base_url=server.url, weight_check_steps=1, **TWO_STEPS)
    finally:
        server.stop()
    assert run.code == 0
    checks = [line["rollout/weight_check"] for line in run.steps if "rollout/weight_check" in line]
    differences = [line["rollout/logp_diff"] for line in run.steps]
    print(f"{family} vllm: rollout/weight_check {max(checks):.1e}, rollout/logp_diff {max(differences):.1e}")
    assert len(checks) == 2 and max(checks) < 1e-2
