"""Model folders that were copied in part, or put together of two."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from swift_r1.errors import UsageError
from swift_r1.launch.checks.model_folder import model_faults
from swift_r1.models.loading import load_model
from swift_r1.models.shape import transformers_config


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def reconfigure(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("heads", [0, -2])
def test_a_model_without_attention_heads(folder: Path, heads: int) -> None:
    reconfigure(folder, num_attention_heads=heads)
    [fault] = model_faults(str(folder), {})
    assert fault.endswith(f"has {heads} attention heads by its config.json (num_attention_heads)")
    if not heads:
        with pytest.raises(UsageError, match="num_attention_heads, or another size, is 0"):
            transformers_config(str(folder))


@pytest.mark.parametrize("kept", [0, 7, 1000, -1])
def test_weights_cut_short(folder: Path, kept: int) -> None:
    assert model_faults(str(folder), {}) == []
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    [fault] = model_faults(str(folder), {})
    assert fault.endswith("model.safetensors cut short, or no safetensors: copy or download again")


@pytest.mark.parametrize("name", ["generation_config.json", "model-2.safetensors", "config.json"])
def test_a_pipe_is_not_opened(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    [fault] = model_faults(str(folder), {})
    assert fault.endswith((f"{name}: not a regular file", "it lacks config.json"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "k_proj.bias and 5 more"),
        ({"num_hidden_layers": 3}, r"lack model.layers.2.\S* and 8 more"),
        ({"intermediate_size": 256}, r"mlp.down_proj.weight and 5 more, or have other sizes"),
    ],
)
def test_weights_of_another_config(folder: Path, fields: dict[str, object], said: str) -> None:
    """transformers makes up what is missing."""
    reconfigure(folder, **fields)
    with pytest.raises(UsageError, match=said):
        load_model(str(folder), None, gradient_checkpointing=False)


def test_towers_are_refused_where_the_language_model_cannot_run_alone(folder: Path) -> None:
    reconfigure(
        folder, vision_config={}, model_type="gemma3", text_config={"num_attention_heads": 6}
    )
    assert model_faults(str(folder), {}) == []
    [fault] = model_faults(str(folder), {}, spread=4)
    assert fault.startswith("--sequence_parallel_size 4 does not divide the 6 attention heads")
    [fault] = model_faults(str(folder), {}, "--critic_model")
    assert "a critic is a text model" in fault
    reconfigure(folder, model_type="siglip")
    [fault] = model_faults(str(folder), {})
    assert (
        "is not a text model (siglip with a vision_config), nor one whose language model" in fault
    )


def test_an_unknown_architecture(folder: Path) -> None:
    reconfigure(folder, model_type="foo")
    with pytest.raises(UsageError, match=r"cannot load the config of .* model type `foo`"):
        transformers_config(str(folder))
