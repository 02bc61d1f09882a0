"""`--estimate true` against what runs really took, and what a run says that memory ends."""

from __future__ import annotations

import re

import pytest

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
LENGTHS = {
    "max_length": 40,
    "max_completion_length": 64,
    "max_steps": 2,
    "reward_isolation": "inline",
}
CONFIGURATIONS = {
    "full": (1, {"per_device_train_batch_size": 32, "torch_dtype": "bfloat16"}),
    "lora": (
        1,
        {"per_device_train_batch_size": 64, "torch_dtype": "float32", "train_type": "lora"},
    ),
    "zero2": (
        2,
        {"per_device_train_batch_size": 16, "torch_dtype": "bfloat16", "deepspeed": "zero2"},
    ),
    "zero3": (
        2,
        {"per_device_train_batch_size": 16, "torch_dtype": "bfloat16", "deepspeed": "zero3"},
    ),
    "sequence": (
        2,
        {
            "per_device_train_batch_size": 16,
            "torch_dtype": "bfloat16",
            "deepspeed": "zero2",
            "sequence_parallel_size": 2,
            "max_tokens_per_micro_batch": 832,
        },
    ),
    "checkpointed": (
        1,
        {
            "per_device_train_batch_size": 64,
            "gradient_checkpointing": "true",
            "optim": "adamw_8bit",
            "beta": 0.1,
        },
    ),
}


@pytest.fixture(scope="module")
def medium_model(save_model, tmp_path_factory):
    """42 million random parameters: they never say the end token, so that every completion has its full length."""
    return save_model(
        tmp_path_factory.mktemp("medium") / "llama",
        dtype="bfloat16",
        initializer_range=0.02,
        **SIZES,
    )


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(CONFIGURATIONS))
def test_estimates_are_within_a_fifth_of_the_peak(rlhf, medium_model, capfd, name):
    processes, flags = CONFIGURATIONS[name]
    told = rlhf(medium_model, processes, estimate="true", **LENGTHS, **flags)
    assert told.code == 0
    estimated = float(re.search(r"at most\s*│\s*([\d.]+)", capfd.readouterr().out)[1])
    run = rlhf(medium_model, processes, **LENGTHS, **flags)
    assert run.code == 0
    measured = run.steps[-1]["memory/peak_gib"]
    print(f"| {name} | {estimated:.2f} | {measured:.2f} | {estimated / measured - 1:+.0%} |")
    assert run.steps[-1]["completions/mean_length"] > 60
    assert estimated == pytest.approx(measured, rel=0.2)
