"""A config that says that the output head is the embedding, over files that have another one: refused everywhere alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swift_r1.errors import UsageError
from swift_r1.launch.checks.model_folder import model_faults
from swift_r1.models.expected import expected_weights
from swift_r1.models.loading import load_critic, load_judging_model, load_model
from swift_r1.models.merging import misfit
from swift_r1.models.shape import shape_of
from tests.conftest import save_tiny_model
from tests.vision import write_tiny

SAYS = r"output head is the embedding .* another .*lm_head\.weight: set it to false there"
READERS = {
    "preflight": lambda model: [
        UsageError(*faults) for faults in [model_faults(model, {})] if faults
    ],
    "trainer": lambda model: load_model(model, None, False),
    "critic": lambda model: load_critic(model, None, False),
    "judge": lambda model: load_judging_model(model, None, None),
    "server": expected_weights,
    "adapters": lambda model: misfit(model, {}),
    "memory": shape_of,
}


def claim(folder: Path, tied: bool) -> str:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"tie_word_embeddings": tied}
    path.write_text(json.dumps(config))
    return str(folder)


def read(reader: str, model: str) -> None:
    found: Any = READERS[reader](model)
    if reader == "preflight" and found:
        raise found[0]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("shards", [False, True])
def test_another_head_is_refused(reader: str, shards: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tied=False)
    if shards:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        model.save_pretrained(tmp_path, max_shard_size="20KB")
    with pytest.raises(UsageError, match=SAYS):
        read(reader, claim(tmp_path, True))


@pytest.mark.parametrize("reader", READERS)
def test_a_head_that_is_the_embedding_may_be_in_the_files(reader: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tied=False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    read(reader, claim(tmp_path, True))

    # only the last row differs
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=SAYS):
        load_model(claim(tmp_path, True), None, False, flag="--ref_model")


def test_the_language_model_of_a_multimodal_one(tmp_path: Path) -> None:
    write_tiny("gemma3", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    (name,) = (one for one in tensors if one.endswith("embed_tokens.weight"))
    tensors["lm_head.weight"] = torch.zeros_like(tensors[name])
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UsageError, match=SAYS):
        load_model(str(tmp_path), None, False)
    tensors["lm_head.weight"] = tensors[name].clone()
    save_file(tensors, path, {"format": "pt"})
    load_model(str(tmp_path), None, False, flag="--ref_model")


def test_a_head_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"its weights lack lm_head\.weight"):
        load_model(claim(save_tiny_model(tmp_path), False), None, False)
