"""Estimates by hand, and what a run that is out of memory says."""

import dataclasses
import json

import pytest
import torch

from swift_r1.cli.rank import known_end
from swift_r1.errors import EXIT_RUN_FAILED
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.models.lora import add_lora
from swift_r1.models.shape import shape_of
from swift_r1.training.memory import (
    GIB,
    changes,
    estimate,
    flags_that_fit,
)

HALF_B = {
    "model_type": "llama",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""The kit's shape of Qwen2.5-0.5B (scripts/gpu/shapes.py)."""


@pytest.fixture(scope="module")
def shape(tiny_model_untied):
    return shape_of(str(tiny_model_untied))


def args_of(model="m", **flags):
    values = {
        "model": str(model),
        "max_length": 100,
        "max_completion_length": 100,
        "use_vllm": True,
    }
    return RlhfArguments(
        **values | {"torch_dtype": "bfloat16", "per_device_train_batch_size": 8} | flags
    )


def parts(shape, world=1, **flags):
    return estimate(args_of(**flags), shape, world, libraries=0.0).parts


def test_the_shape_is_the_models(shape, tiny_model_untied):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_untied)
    assert dict(shape.weights) == {name: p.numel() for name, p in model.named_parameters()}
    assert (shape.layers, shape.hidden, shape.feed_forward, shape.kv_width) == (2, 64, 128, 32)
    add_lora(
        model,
        AdapterArguments(
            train_type="lora", lora_rank=4, lora_alpha=16, target_modules=["all-linear"]
        ),
    )
    assert shape.adapters(
        AdapterArguments(
            train_type="lora", lora_rank=4, lora_alpha=16, target_modules=["all-linear"]
        )
    ) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.adapters(
        AdapterArguments(train_type="lora", lora_rank=4, lora_alpha=16, target_modules=["q_proj"])
    ) == 2 * 4 * (64 + 64)


@pytest.mark.parametrize(
    ("chunk", "measured"), [(2 << 30, 24.43), (512 << 20, 20.10), (128 << 20, 18.80)]
)
def test_a_gpu_holds_what_an_h200_held(chunk, measured, tmp_path):
    """The training step of results/gpu: a 0.5B, micro-batches of 16 x 640 tokens, no checkpointing, by the size of its
    chunks of logits. torch's own peak counts neither its context nor what it holds in addition."""
    (tmp_path / "config.json").write_text(json.dumps(HALF_B))
    small = shape_of(str(tmp_path))
    args = args_of(
        per_device_train_batch_size=16,
        max_length=128,
        max_completion_length=512,
        gradient_checkpointing=False,
        num_generations=8,
        share_prompt="false",
    )
    found = estimate(args, small, 1, libraries=0.0, card=chunk / 0.03 + 1)
    held = sum(found.parts.values()) + sum(
        size for name, size in found.phases["training"].items() if "slack" not in name
    )
    assert held / GIB == pytest.approx(measured, rel=0.01)


def test_the_fewest_flags_that_make_a_run_fit(shape):
    """One where one is enough, else two; none where no two are; those that change least first."""
    args = args_of(per_device_train_batch_size=64, gradient_checkpointing=False)

    def flags(limit):
        def fits(other):
            return estimate(other, shape, 1, 0.0, card=80.0 * GIB).peak <= limit

        return flags_that_fit(args, fits, on_gpu=True)

    peaks = sorted(
        estimate(one, shape, 1, 0.0, card=80.0 * GIB).peak for _, one in changes(args, True)
    )
    whole = estimate(args, shape, 1, 0.0, card=80.0 * GIB).peak
    assert flags(whole * 0.9) == ("--gradient_checkpointing true",)
    two = flags(peaks[0] * 0.9)
    assert len(two) == 2 and two[0] != two[1]
    assert flags(1000.0) == ()


def test_parts_are_what_tensors_take(shape):
    total = shape.total
    full = parts(shape)
    assert (full["weights"], full["gradients"], full["optimizer"]) == (
        2 * total,
        4 * total,
        12 * total,
    )
    assert parts(shape, torch_dtype="float32")["optimizer"] == 8 * total
    assert parts(shape, optim="adamw_8bit")["optimizer"] == 6 * total
    assert parts(shape, beta=0.1)["reference"] == 2 * total
    assert parts(shape, world=2, deepspeed="zero2")["optimizer"] == 6 * total
    assert parts(shape, world=2, deepspeed="zero3")["weights"] == total
    assert (
        parts(shape, world=4, deepspeed="zero3", zero_hpz_partition_size=2)[
            "second copy of weights"
        ]
        == total
    )
    assert parts(shape, world=2) == full  # DDP
    fsdp = parts(shape, world=2, fsdp="fsdp2")
    assert (fsdp["weights"], fsdp["optimizer"]) == (total, 6 * total)
    assert fsdp["gradients"] == 2 * total + 6 * max(
        shape.head, (total - shape.head) // shape.layers
    )
    lora = parts(shape, train_type="lora", beta=0.1)
    assert (
        lora["optimizer"]
        == 12
        * shape.adapters(
            AdapterArguments(
                train_type="lora", lora_rank=8, lora_alpha=16, target_modules=["all-linear"]
            )
        )
        and "reference" not in lora
    )
    assert parts(shape, train_type="qlora")["weights"] < 0.6 * lora["weights"]
    frozen = parts(shape, freeze_parameters=["model"])
    assert frozen["optimizer"] == 12 * shape.head


def test_a_run_out_of_memory_says_what_helps(tiny_model, capsys):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.int8)
    args = args_of(tiny_model, gradient_checkpointing=False, per_device_train_batch_size=64)
    assert (
        known_end(caught.value, {"args": args.to_dict(), "command": ["swift", "rlhf"]})
        == EXIT_RUN_FAILED
    )
    [line] = capsys.readouterr().err.splitlines()
    assert (
        "rank 0 is out of memory: 1073741824.00 GiB more could not be allocated; the largest part is"
        in line
    )
    assert "what would help most: --" in line


def test_the_critic_and_an_offloaded_reference_are_counted(shape):
    """The critic in full, also beside adapters; its own head left out where the model has one of its own."""
    args = args_of(rlhf_type="ppo", kl_coef=0.1)
    alone = estimate(args, shape, 1, libraries=0)
    found = estimate(args, shape, 1, libraries=0, critic=shape)
    size = shape.total - shape.head  # not tied
    assert found.parts["critic's weights"] == 2 * size
    assert found.parts["critic's gradients"] == 4 * size
    assert found.parts["critic's optimizer"] == (4 + 8) * size
    assert sum(found.parts.values()) == sum(alone.parts.values()) + 18 * size
    assert found.parts["reference"] == 2 * shape.total
    away = estimate(
        dataclasses.replace(args, offload_ref_model=True),
        shape,
        1,
        libraries=0,
        critic=shape,
        card=80.0 * GIB,
    )
    assert away.on_host == {"reference": 2 * shape.total} and "reference" not in away.parts
