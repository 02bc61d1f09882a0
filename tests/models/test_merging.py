"""`swift merge-lora`: a plain model with the numbers that training gave to the engine."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from swift_r1.cli.main import main
from swift_r1.errors import UsageError
from swift_r1.flags.adapters import AdapterArguments, adapter_flags
from swift_r1.models.loading import Quantization, load_model
from swift_r1.models.merging import write_base
from swift_r1.models.weights import added_weights, policy_weights
from tests.conftest import save_tiny_tokenizer


def adapted(model, folder, quantization):
    """A model with adapters that do something, saved as a checkpoint is."""
    loaded = load_model(
        model,
        "bfloat16",
        False,
        AdapterArguments(
            train_type="lora", lora_rank=4, lora_alpha=16, target_modules=["q_proj", "down_proj"]
        ),
        quantization=quantization,
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    loaded.save_pretrained(folder, state_dict={w.name: w.value() for w in added_weights(loaded)})
    write_base(loaded, folder, quantization)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return loaded


@pytest.mark.parametrize("quantization", [None, Quantization()])
def test_merged_is_what_the_engine_had(tiny_model, tmp_path, capsys, quantization):
    trained = adapted(tiny_model, tmp_path / "checkpoint-3", quantization)
    assert main(["merge-lora", "--adapters", str(tmp_path / "checkpoint-3")]) == 0
    output = tmp_path / "checkpoint-3-merged"
    assert capsys.readouterr().out.endswith(f"merged model: {output}\n")
    assert (output / "model.safetensors").stat().st_mode == (output / "config.json").stat().st_mode
    merged = AutoModelForCausalLM.from_pretrained(output)
    assert merged.dtype == torch.bfloat16 and not hasattr(merged.config, "quantization_config")
    weights = dict(merged.named_parameters())
    base = dict(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).named_parameters()
    )
    assert weights.keys() == base.keys()
    for weight in policy_weights(trained):
        assert torch.equal(weights[weight.name], weight.value()), weight.name
        moved = not torch.equal(weights[weight.name], base[weight.name])
        changed = ("proj",) if quantization else ("q_proj", "down_proj")
        assert moved == any(name in weight.name for name in changed), weight.name
    assert AutoTokenizer.from_pretrained(output).chat_template


def test_the_model_may_be_given(tiny_model, tmp_path):
    adapted(tiny_model, tmp_path / "a", None)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": None})
    )
    words = ["merge-lora", "--adapters", str(tmp_path / "a"), "--output_dir", str(tmp_path / "out")]
    assert main(words) == 2
    assert main([*words, "--model", str(tiny_model)]) == 0
    assert main([*words, "--model", str(tiny_model)]) == 2  # something is in the way


@pytest.mark.parametrize("module", ["experts.0.gate_proj", "experts"])
def test_adapters_of_experts_are_refused_for_what_they_are(tmp_path, capsys, module):
    """Not as those of another model: it has these experts, in one tensor a layer."""
    model = save_mixture(tmp_path / "model")
    name = f"base_model.model.model.layers.0.mlp.{module}.lora_"
    tensors = {f"{name}A.weight": torch.zeros(2, 32), f"{name}B.weight": torch.zeros(16, 2)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["gate_proj"]}
    folder = tmp_path / "adapters"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(model)})
    )
    assert main(["merge-lora", "--adapters", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"adapt experts ({name}A.weight)" in said and "are not of" not in said

    flags = adapter_flags("--adapters", folder)
    given = AdapterArguments(train_type="lora", adapters=[str(folder)], **flags)
    with pytest.raises(UsageError, match=f"^--adapters {folder}: gate_proj: the experts"):
        load_model(model, None, False, given)


def save_mixture(folder):
    config = Qwen3MoeConfig(
        vocab_size=save_tiny_tokenizer(folder),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
