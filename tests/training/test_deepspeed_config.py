"""`--deepspeed` as a name, a file or JSON, held against the flags. Without DeepSpeed."""

import json

import pytest

from swift_r1.flags import RlhfArguments, World, parse_arguments
from swift_r1.flags.training import DEEPSPEED_NAMES
from swift_r1.launch.checks.preflight import deepspeed_faults
from swift_r1.training.backends.deepspeed_config import (
    contradictions,
    moved_twice,
    read_config,
)

FLAGS = {
    "dtype": "bfloat16",
    "micro_batch": 4,
    "accumulation": 2,
    "step": 16,
    "world_size": 2,
    "max_grad_norm": 1.0,
}

MS_SWIFT = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "offload_param": {"device": "none"},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
}
"""The form of ms-swift's own files."""


@pytest.mark.parametrize("name", DEEPSPEED_NAMES)
def test_a_gpu_overlaps_and_pins_what_a_cpu_does_not(name):
    """In our own files and for "auto"; on a CPU all is as the file says, and so is what a file of the user says."""
    here, there = (read_config(name, gpu=gpu).get("zero_optimization", {}) for gpu in (False, True))
    assert here.get("overlap_comm", False) is False
    if name != "zero0":
        assert there["overlap_comm"] is True
        assert there["reduce_bucket_size"] == 200_000_000 > here["reduce_bucket_size"]
    for part in ("offload_optimizer", "offload_param"):
        assert here.get(part, {}).get("pin_memory", False) is False
        assert there.get(part, {}).get("pin_memory", True) is True
    assert here.keys() == there.keys()
    if name.startswith("zero3"):
        assert there["stage3_prefetch_bucket_size"] == 50_000_000
    said = {"zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": "auto"}}
    found = read_config(json.dumps(said), gpu=True)["zero_optimization"]
    assert found == {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 200_000_000}


def test_what_is_on_the_host_for_good_is_not_moved_there():
    assert list(moved_twice(read_config("zero3"), True, True)) == []
    assert list(moved_twice(read_config("zero2_offload"), True, False)) == []
    assert list(moved_twice(read_config('{"zero_optimization": 3}'), True, True)) == []
    [fault] = moved_twice(read_config("zero2_offload"), True, True)
    assert (
        fault
        == "--deepspeed sets offload_optimizer, which stays on the host: leave --offload_optimizer true out"
    )
    assert len(list(moved_twice(read_config("zero3_offload"), True, True))) == 2


def test_a_second_copy_of_weights_needs_stage_3_and_groups_of_equal_size():
    config = read_config("zero3", hpz=2)
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 2
    one = {"micro_batch": 1, "accumulation": 1}
    assert list(contradictions(config, **FLAGS | one | {"world_size": 4})) == []
    for other, world in ((read_config("zero2", hpz=2), 4), (config, 3)):
        [fault] = contradictions(other, **FLAGS | one | {"world_size": world})
        assert (
            "--zero_hpz_partition_size 2 needs ZeRO-3, and a number of processes that it divides"
            in fault
        )


def test_a_file_and_json_say_the_same(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(MS_SWIFT))
    config = read_config(str(path))
    assert config == read_config(json.dumps(MS_SWIFT))
    assert config["zero_optimization"] == {"stage": 3, "offload_param": {"device": "none"}}
    assert config["steps_per_print"] == 2000
    assert list(contradictions(config, **FLAGS)) == []


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (
            {"train_micro_batch_size_per_gpu": 8},
            "train_micro_batch_size_per_gpu 8, but --per_device_train_batch_size is 4",
        ),
        ({"train_batch_size": 8}, "is 16"),
        ({"gradient_accumulation_steps": 1}, "--gradient_accumulation_steps is 2"),
        ({"gradient_clipping": 0.5}, "--max_grad_norm is 1"),
        ({"bf16": {"enabled": False}}, "bf16.enabled false, but --torch_dtype is bfloat16"),
        ({"fp16": {"enabled": True}}, "fp16.enabled true, but --torch_dtype is bfloat16"),
        ({"optimizer": {"type": "AdamW"}}, "--optim"),
        ({"scheduler": {"type": "WarmupLR"}}, "--lr_scheduler_type"),
        ({"zero_force_ds_cpu_optimizer": True}, "--optim decides"),
        ({"zero_optimization": {"stage": 4}}, "stage is 0, 1, 2 or 3"),
    ],
)
def test_contradictions_are_named(config, part):
    [fault] = contradictions(read_config(json.dumps(config)), **FLAGS)
    assert part in fault


@pytest.mark.parametrize(
    ("more", "count"), [("", 1), ("--quant_bits", 0), ("--use_dora", 0), ("zero3", 0)]
)
def test_dora_over_4_bits_is_refused_under_zero_3(more: str, count: int) -> None:
    """Without one of the three it is not."""
    flags = {
        "--train_type": "lora",
        "--quant_bits": "4",
        "--use_dora": "true",
        "--deepspeed": "zero3",
    }
    flags.pop(more, None)
    flags["--deepspeed"] = "zero2" if more == "zero3" else "zero3"
    words = [
        "--rlhf_type",
        "grpo",
        "--model",
        "m",
        "--dataset",
        "d",
        "--reward_funcs",
        "r",
        "--torch_dtype",
        "float32",
    ]
    args = parse_arguments(
        RlhfArguments, [*words, *(word for pair in flags.items() for word in pair)], {}
    )
    found = [
        fault
        for fault in deepspeed_faults(args, World())
        if "--use_dora true over 4-bit weights" in fault
    ]
    assert len(found) == count
