"""A save: whole files from shares, in the form that transformers writes, with one bucket in memory at a time."""

from __future__ import annotations

import hashlib
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from swift_r1.flags.adapters import AdapterArguments
from swift_r1.models.loading import Quantization, load_model
from swift_r1.models.weights import added_weights, policy_weights
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.checkpoint.saving import Saver
from swift_r1.training.checkpoint.state import Fingerprint, PromptState, RunState
from swift_r1.training.checkpoint.tensors import (
    ModelShards,
    SavedTensors,
)
from swift_r1.training.memory import size_text
from swift_r1.training.optimizer import OptimizerConfig

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    # In memory a layer's experts are one tensor, in files each is one.
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16
    ),
}
STATE = RunState(
    1, 1, {"": PromptState()}, 1, 1, "", 0, {}, {}, {}, None, {}, Fingerprint({}, 1, "", 1)
)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("size", [1, 3])
def test_shares_together_are_what_transformers_writes(
    kind: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swift_r1.training.checkpoint.tensors.BUCKET_BYTES", 10_000)
    torch.manual_seed(0)
    made, ours = tmp_path / "made", tmp_path / "ours"
    AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).save_pretrained(made)
    model = AutoModelForCausalLM.from_pretrained(made)
    model.save_pretrained(ours, state_dict={})
    backend = LocalBackend(model, OptimizerConfig(1e-3, 0.0, 0.9, 0.95, 1e-8, 1.0))
    written = {}
    for rank in range(size):
        backend.ranks = Ranks(rank, size, CPU, None)
        shards = ModelShards(model, policy_weights(model), backend.ranks)
        shards.write_index(ours)
        entry = shards.write(ours / str(shards.file), shards.tensors(backend))
        body = (ours / str(shards.file)).read_bytes()
        assert entry == {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
        written[str(shards.file)] = load_file(ours / str(shards.file))
    assert (
        set(written) == {path.name for path in ours.glob("*.safetensors")} and len(written) == size
    )
    if size > 1:
        index = json.loads((ours / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {
            name: file for file, tensors in written.items() for name in tensors
        }
    found = {name: tensor for tensors in written.values() for name, tensor in tensors.items()}
    expected = load_file(made / "model.safetensors")
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
    again = AutoModelForCausalLM.from_pretrained(ours).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("disk_refuses", [False, True])
def test_one_bucket_at_a_time(tiny_model: Path, tmp_path: Path, disk_refuses: bool) -> None:
    """Also where the disk has refused already, and what is left is gathered for nobody."""
    backend = LocalBackend(
        load_model(tiny_model, None, False), OptimizerConfig(1e-3, 0.0, 0.9, 0.95, 1e-8, 1.0)
    )
    made: list[weakref.ref[torch.Tensor]] = []

    def training_state():
        for number in range(8):
            tensor = torch.full((10,), float(number))
            made.append(weakref.ref(tensor))
            assert sum(one() is not None for one in made) == 1
            bucket = [(f"master:{number}", tensor)]
            del tensor
            yield bucket
            del bucket

    backend.training_state = training_state
    run_dir = tmp_path / ("no such folder" if disk_refuses else "")
    saver = Saver(
        run_dir,
        backend,
        None,
        AutoTokenizer.from_pretrained(tiny_model),
        Ranks(0, 1, CPU, None),
        1,
        True,
    )
    saver.save(1, STATE, {}, False)
    assert len(made) == 8 and (tmp_path / "checkpoint-1").exists() == (not disk_refuses)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("with_state", [True, False])
def test_what_a_checkpoint_will_take_is_known_before(
    tiny_model: Path, tmp_path: Path, with_state: bool, dtype: str
) -> None:
    backend = LocalBackend(
        load_model(tiny_model, dtype, False), OptimizerConfig(1e-3, 0.0, 0.9, 0.95, 1e-8, 1.0)
    )
    for parameter in backend.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    backend.step(1e-3)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    saver = Saver(tmp_path, backend, None, tokenizer, Ranks(0, 1, CPU, None), 1, with_state)
    saver.save(1, STATE, {}, True)
    made = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert saver.bytes_of_each("adamw_torch_fused") == pytest.approx(made, rel=0.1)
    assert saver.lack_of_room(1, "adamw_torch_fused") is None
    lack = str(saver.lack_of_room(1 << 50, "sgd"))
    each = size_text(saver.bytes_of_each("sgd"))
    assert each.endswith("iB") and not each.startswith("0")
    assert (
        lack.startswith(f"{1 << 50:,} checkpoints take about {each} each, and ")
        and " are free in " in lack
    )


def test_a_checkpoint_keeps_the_dtype_of_the_config(tmp_path: Path, tiny_model: Path) -> None:
    """The state has the float32 weights that a resumed run goes on with."""
    AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.bfloat16).save_pretrained(
        tmp_path / "made"
    )
    backend = LocalBackend(
        load_model(tmp_path / "made", "float32", False),
        OptimizerConfig(1e-3, 0.0, 0.9, 0.95, 1e-8, 1.0),
    )
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter += 1e-4 * torch.randn_like(parameter)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    saver = Saver(
        tmp_path, backend, None, tokenizer, Ranks(0, 1, CPU, None), 1, True, own_dtype=True
    )
    shutil.rmtree(tmp_path / "made")  # which a save no longer needs
    saver.save(1, STATE, {}, True)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    state = SavedTensors(tmp_path / "checkpoint-1" / "state", "optimizer")
    assert (
        saved.config.dtype == saved.dtype == torch.bfloat16 and backend.model.dtype == torch.float32
    )
    for name, parameter in backend.model.named_parameters():
        assert torch.equal(state(f"master:{name}"), parameter)
        assert torch.equal(saved.get_parameter(name), parameter.bfloat16())


def test_adapters_over_4_bits_are_saved_as_they_were_gathered(
    tiny_model: Path, tmp_path: Path
) -> None:
    """transformers would write a quantized model's own tensors, which are parts under ZeRO-3 and FSDP2."""
    model = load_model(
        tiny_model,
        "float32",
        False,
        AdapterArguments(train_type="lora", lora_rank=2, lora_alpha=4, target_modules=["q_proj"]),
        quantization=Quantization(),
    )
    backend = LocalBackend(model, OptimizerConfig(1e-3, 0.0, 0.9, 0.95, 1e-8, 1.0))
    gathered = {
        weight.name: torch.full_like(weight.value(), 7.0) for weight in added_weights(model)
    }
    backend.weight_buckets = lambda *_, **__: iter([list(gathered.items())])  # type: ignore[method-assign]
    saver = Saver(
        tmp_path,
        backend,
        None,
        AutoTokenizer.from_pretrained(tiny_model),
        Ranks(0, 1, CPU, None),
        1,
        True,
    )
    saver.save(1, STATE, {}, True)
    saved = load_file(tmp_path / "checkpoint-1" / "adapter_model.safetensors")
    assert len(saved) == len(gathered) == 4 and all(
        (tensor == 7.0).all() for tensor in saved.values()
    )
    # all can read it
    assert len({path.stat().st_mode for path in (tmp_path / "checkpoint-1").glob("adapter_*")}) == 1
    assert model.hf_quantizer is not None
