"""`--fsdp`: ms-swift's files, and what they cannot ask for."""

import json

import pytest

from swift_r1.errors import UsageError
from swift_r1.training.backends.fsdp_config import FsdpConfig, read_fsdp

AS_MS_SWIFT = {
    "_description": "as ms-swift ships it",
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "fsdp_version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": True,
    },
}


def test_a_file_as_ms_swift_has_them(tmp_path):
    file = tmp_path / "fsdp2.json"
    file.write_text(json.dumps(AS_MS_SWIFT))
    assert read_fsdp(str(file)) == FsdpConfig(checkpointing=True)
    assert read_fsdp("fsdp2") == read_fsdp("{}") == FsdpConfig()


def test_every_setting_that_acts():
    settings = {"fsdp_cpu_ram_efficient_loading": False, "transformer_layer_cls_to_wrap": "A,B"}
    text = json.dumps({"fsdp": "shard_grad_op", "fsdp_config": settings})
    assert read_fsdp(text) == FsdpConfig(
        reshard_after_forward=False, rank0_loads=False, layers=("A", "B")
    )


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (
            {"fsdp": "full_shard offload"},
            ["offload keeps no weights in host memory: --deepspeed zero3_offload does"],
        ),
        ({"fsdp": "hybrid_shard"}, ["hybrid_shard shards over all ranks"]),
        ({"fsdp": "no_shard"}, ["no_shard is not known"]),
        ({"mixed_precision": "bf16"}, ["mixed_precision is not known"]),
        (
            {"fsdp_config": {"fsdp_version": 1, "odd": 2}},
            ["fsdp_version 1 must be 2", "odd 2 is not known"],
        ),
        (
            {"fsdp_config": {"reshard_after_forward": "yes"}},
            ['reshard_after_forward "yes" must be true or false'],
        ),
        ({"fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}, ["must be TRANSFORMER_BASED_WRAP"]),
        ({"fsdp_config": {"state_dict_type": "LOCAL_STATE_DICT"}}, ["a checkpoint is both"]),
        ({"fsdp_config": {"fsdp_offload_params": True}}, ["zero3_offload"]),
        ({"fsdp_config": {"sync_module_states": True}}, ["belongs to version 1 of FSDP"]),
        ({"fsdp_config": 3}, ["must be JSON objects"]),
    ],
)
def test_what_is_not_done_is_refused_by_name(content, parts):
    with pytest.raises(UsageError) as caught:
        read_fsdp(json.dumps(content))
    assert len(caught.value.faults) == len(parts)
    for fault, part in zip(caught.value.faults, parts, strict=True):
        assert part in fault


def test_what_is_no_json_object_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    for text, part in (
        ("{bad", "not valid JSON"),
        ("no.json", "No such file"),
        (str(tmp_path / "list.json"), "objects"),
    ):
        with pytest.raises(UsageError, match=part):
            read_fsdp(text)
