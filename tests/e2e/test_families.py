"""Two steps of `swift rlhf` in float32 for each family of models: the whole matrix, of which docs/models.md has the
table (`pytest -m long -s tests/e2e/test_families.py` prints it at its end)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.families import (
    FAMILIES,
    MULTIMODAL,
    family_class,
    family_model,
    save_family,
    tower_names,
)
from tests.resume.conftest import Runs

pytestmark = pytest.mark.long

VOCAB = 102
TWO_STEPS = {
    "torch_dtype": "float32",
    "max_steps": 2,
    "learning_rate": 1e-3,
    "beta": 0.1,
    "max_completion_length": 24,
    "save_steps": 2,
    "logging_steps": 1,
}
NOT_EMBEDDED = "deepseek_v4"  # no cache for its compressed keys
NOT_SERVED = {
    "deepseek_v2": "vLLM's MLA on a CPU computes another distribution, before any update",
    "deepseek_v3": "vLLM's MLA on a CPU computes another distribution, before any update",
    "deepseek_v32": "vLLM has no sparse attention on a CPU",
    "deepseek_v4": "as deepseek_v32",
    "kimi_linear": "vLLM's class needs kernels of a GPU",
    "lfm2_moe": "vLLM on a CPU computes another distribution, by 0.2 nats",
    "qwen3_next": "vLLM's kernel of its layers on a CPU takes bfloat16 only",
    "qwen3_5": "as qwen3_next",
    "qwen3_5_moe": "as qwen3_next",
    "gpt_oss": "vLLM's engine ends at its first completion on a CPU",
}
SERVED_WITH = {"cohere2": {"sliding_window": 512}}
"""vLLM lets Cohere 2's windows see one token more than transformers does: they agree up to the window."""


def reloaded(folder, family):
    """Every tensor that transformers has after loading, towers too."""
    return family_class(family).from_pretrained(folder, dtype=torch.float32).state_dict()


def steps(folder):
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def table():
    """`{family: {column: figure}}`, printed as the rows of a table when all tests have run."""
    cells = {}
    yield lambda family, column, figure: cells.setdefault(family, {}).update(
        {column: f"{figure:.1e}"}
    )
    for family, row in cells.items():
        figures = [row.get(column, "-") for column in ("full", "lora", "vllm")]
        print(f"| {' | '.join([family, *figures, 'yes' if 'full' in row else '-'])} |")


@pytest.fixture(scope="module")
def runs(tiny_model):
    return Runs(tiny_model)


@pytest.mark.parametrize("train_type", ["full", "lora"])
@pytest.mark.parametrize("family", [one for one in (*FAMILIES, *MULTIMODAL) if one != NOT_EMBEDDED])
def test_with_the_embedded_engine(runs, table, tmp_path, family, train_type):
    model, folder = save_family(tmp_path / "model", family), tmp_path / "run"
    assert (
        runs.run(folder, model=model, train_type=train_type, use_vllm="false", **TWO_STEPS).code
        == 0
    )
    differences = [line["rollout/logp_diff"] for line in steps(folder)]
    table(family, train_type, max(differences))
    assert len(differences) == 2 and max(differences) < 1e-4
    if train_type == "lora":
        # Adapters alone are in the folder, and are over the model as it was.
        assert {path.name for path in (folder / "checkpoint-2").glob("*.safetensors")} == {
            "adapter_model.safetensors"
        }
    before, after = reloaded(model, family), reloaded(folder / "checkpoint-2", family)
    trained = {
        name for name, tensor in before.items() if not torch.equal(tensor, after.get(name, tensor))
    }
    if train_type == "lora":
        adapters = load_file(folder / "checkpoint-2" / "adapter_model.safetensors")
        assert not trained and any(
            tensor.any() for name, tensor in adapters.items() if ".lora_B." in name
        )
        return
    # All that has a gradient was trained: of a bias that all keys share it is 0 but for rounding.
    buffers = {
        name
        for name in before
        if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar"))
    }
    buffers |= {name for name in before if ".indexer." in name}
    towers = tower_names(family_model(family, VOCAB))
    assert before.keys() == after.keys() and trained == before.keys() - buffers - towers
    # And the file is in the form of the family's checkpoints.
    files = [load_file(path / "model.safetensors") for path in (model, folder / "checkpoint-2")]
    assert files[0].keys() == files[1].keys()


def test_a_family_without_a_cache_is_refused(runs, tmp_path):
    model = save_family(tmp_path / "model", NOT_EMBEDDED)
    run = runs.run(tmp_path / "run", model=model, use_vllm="false", **TWO_STEPS)
    assert run.code == 2 and "no cache for the compressed_sparse_attention" in run.said


@pytest.mark.parametrize("family", sorted({*FAMILIES, *MULTIMODAL} - set(NOT_SERVED)))
def test_through_vllm(rlhf, launch_server, table, tmp_path, family):
    if family in MULTIMODAL:
        pytest.importorskip("torchvision")
    model = save_family(tmp_path / "model", family, **SERVED_WITH.get(family, {}))
    server = launch_server(model, torch_dtype="float32", max_model_len=256)
    try:
        run = rlhf(
            model,
            use_vllm="true",
            vllm_server_base_url=server.url,
            weight_check_steps=1,
            **TWO_STEPS,
        )
    finally:
        server.stop()
    assert run.code == 0
    checks = [line["rollout/weight_check"] for line in run.steps if "rollout/weight_check" in line]
    table(family, "vllm", max(checks))
    assert len(checks) == 2 and max(checks) < 1e-2
