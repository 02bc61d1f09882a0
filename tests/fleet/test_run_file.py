"""The run file: what it may say, and that all that is wrong with it is said at once."""

from __future__ import annotations

import pytest

from swift_r1.errors import UsageError
from swift_r1.fleet.commands import shared_variables, train_words
from swift_r1.fleet.placement import NodeSlot, NoRoom, Room, find_places
from swift_r1.fleet.run_file import Role, read_options, read_run_file, with_addresses


def test_what_a_rollout_server_takes_from_the_policy(write_run):
    run = read_run_file(
        write_run(
            {"train": {"nodes": 2, "gpus": 8}, "rollout": {"replicas": 4, "gpus": 2}},
            rlhf={"torch-dtype": "bfloat16"},
            rollout={"vllm_max_model_len": 64},
        )
    )
    assert run.roles["train"] == Role("train", 2, 8, 8)
    assert run.rollout == {
        "model": "m",
        "torch_dtype": "bfloat16",
        "max_model_len": 64,
        "vllm_tensor_parallel_size": 2,
    }
    assert run.args.use_vllm


def test_a_flag_of_the_command_line_wins_under_any_of_its_names(write_run):
    run = read_run_file(
        write_run({"train": {}}, rlhf={"dtype": "float32"}), {"torch_dtype": "bfloat16"}
    )
    assert run.flags["torch_dtype"] == "bfloat16"


def test_all_faults_together(write_run):
    path = write_run(
        {"rollout": {"replicas": 0, "gpu": 1}, "judge": {"replicas": 2}, "critic": {}},
        rlhf={
            "lerning_rate": 1,
            "nnodes": 3,
            "api_key": "k",
            "resume_from_checkpoint": "x/checkpoint-1",
        },
        rolout={},
        judge={"port": 3},
        ssh=["gen1"],
    )
    with pytest.raises(UsageError) as caught:
        read_run_file(path)
    found = [fault.removeprefix(f"{path}: ") for fault in caught.value.faults]
    assert found == [
        "there is no section rolout: did you mean rollout?",
        "ssh must be a mapping, not ['gen1']",
        "roles: rollout: there is no key gpu: did you mean gpus?",
        "roles: rollout: replicas must be a whole number of at least 1, not 0",
        "roles: judge: has one address: give it vllm_data_parallel_size for more copies of the model",
        "there is no role critic: known are train, rollout, judge, teacher",
        "roles: train is missing: who trains",
        "rlhf: nnodes: say it in roles: train",
        "rlhf: resume_from_checkpoint: swift launch resumes its own runs: only `last` may stand here",
        "rlhf: api_key: a key has no place in a file: set SWIFT_API_KEY where swift launch runs",
        "rlhf: unknown flag --lerning_rate: did you mean --learning_rate?",
        "rlhf: --api_key has no effect without --use_vllm true",
        "judge has flags, and no role of that name: add it to roles, or leave the section out",
    ]


def test_a_warm_start_is_a_part_before(write_run):
    sft = {"model": "base", "dataset": "rows.jsonl", "torch-dtype": "float32"}
    roles = {"train": {"nodes": 2}, "rollout": {}}
    run = read_run_file(write_run(roles, model=None, sft=sft))
    [before, after] = run.parts("out/v0")
    assert train_words(before[0], {}, before[1], resume=False)[3:] == [
        *("sft", "--model", "base", "--dataset", "rows.jsonl", "--torch_dtype", "float32"),
        *("--create_checkpoint_symlink", "true", "--output_dir", "out/v0/sft"),
        *("--add_version", "false"),
    ]
    assert list(before[0].roles) == ["train"] and after[1] == "out/v0"
    assert after[0].flags["model"] == after[0].rollout["model"] == "out/v0/sft/last"
    best = {"eval_steps": 5, "save_steps": 5, "metric_for_best_model": "loss"}
    run = read_run_file(write_run({"train": {}}, model=None, sft=sft | best))
    assert run.parts("out")[1][0].flags["model"] == "out/sft/best"
    lora = {"train_type": "lora"}
    run = read_run_file(write_run(roles, model=None, rlhf=lora, sft=sft | lora))
    [_, (after, _)] = run.parts("out")
    assert (after.flags["model"], after.flags["adapters"]) == ("base", ["out/sft/last"])
    assert after.rollout["model"] == "base"


def test_what_a_warm_start_and_its_run_say_against_each_other(write_run):
    sft = {"model": "base", "dataset": "rows.jsonl", "train_type": "lora", "lora_rank": 4}
    path = write_run(
        {"train": {}},
        model=None,
        rlhf={"train_type": "lora", "lora_rank": 8},
        sft=sft | {"output_dir": "there", "reward_funcs": "digits", "nnodes": 2},
    )
    with pytest.raises(UsageError) as caught:
        read_run_file(path)
    assert [fault.removeprefix(f"{path}: ") for fault in caught.value.faults] == [
        "sft: output_dir: swift launch chooses it: sft is a part of the run of rlhf",
        "sft: nnodes: say it in roles: train",
        "sft: --reward_funcs is of sampling, rewards or their algorithms, which `swift sft` has none of: leave it out",
    ]
    path = write_run({"train": {}}, rlhf={"lora_rank": 8, "train_type": "lora"}, sft=sft)
    with pytest.raises(
        UsageError, match="rlhf: model: it begins with what sft has taught"
    ) as caught:
        read_run_file(path)
    assert "rlhf: lora_rank: the adapters of sft have another" in str(caught.value)
    with pytest.raises(UsageError, match="rlhf: train_type: sft teaches adapters"):
        read_run_file(write_run({"train": {}}, model=None, sft=sft))
    unsaved = {"model": "base", "dataset": "rows.jsonl", "save_strategy": "no"}
    with pytest.raises(UsageError, match="sft: save_strategy: rlhf begins with a checkpoint"):
        read_run_file(write_run({"train": {}}, model=None, sft=unsaved))
    with pytest.raises(UsageError, match="sft is missing: the flags of swift sft"):
        read_run_file(write_run({"train": {}}, model=None, sft={}))


def test_variables(write_run):
    given = {"NCCL_DEBUG": "WARN", "TOKENIZERS_PARALLELISM": False, "N": 3, "JUDGE_API_KEY": None}
    run = read_run_file(write_run({"train": {}}, environ=given))
    assert run.environ == {
        "NCCL_DEBUG": "WARN",
        "TOKENIZERS_PARALLELISM": "false",
        "N": "3",
        "JUDGE_API_KEY": None,
    }
    variables = shared_variables(run, "k", {"JUDGE_API_KEY": "j", "HF_TOKEN": "h", "HOME": "/"})
    assert (
        variables["JUDGE_API_KEY"] == "j"
        and variables["HF_TOKEN"] == "h"
        and "HOME" not in variables
    )
    with pytest.raises(
        UsageError, match="environ: JUDGE_API_KEY has no value, and is not set here"
    ):
        shared_variables(run, "k", {})


def test_variables_that_cannot_be(write_run):
    path = write_run(
        {"train": {"gpus": 2, "processes": 1}},
        environ={"HF_TOKEN": "hidden", "NNODES": 2, "LIST": [1], "SWIFT_API_KEY": "x"},
    )
    with pytest.raises(UsageError) as caught:
        read_run_file(path)
    assert [fault.removeprefix(f"{path}: ") for fault in caught.value.faults] == [
        "roles: train: processes: leave it out where there are gpus, each of which has one",
        "environ: HF_TOKEN: a key has no place in a file: leave its value out, and set it here",
        "environ: NNODES: swift launch chooses it",
        "environ: LIST must be one value, not [1]",
        "environ: SWIFT_API_KEY: swift launch chooses it",
    ]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"use_vllm": False}, "leave out use_vllm and vllm_mode"),
        ({"vllm_mode": "colocate"}, "leave out use_vllm and vllm_mode"),
        ({"vllm_server_host": ["gen9"]}, "the role rollout has addresses"),
        ({"teacher_model": "t"}, "the role teacher teaches"),
    ],
)
def test_flags_that_contradict_a_role(flags, fault):
    with pytest.raises(UsageError, match=fault):
        with_addresses(flags, {"rollout": ["http://a:1"], "teacher": ["http://b:1"]})


def test_servers_of_ones_own_need_no_role(write_run):
    run = read_run_file(
        write_run({"train": {}}, rlhf={"use_vllm": True, "vllm_server_host": ["gen9"]})
    )
    assert run.args.rollout_base_urls == ("http://gen9:8000",)


def test_options_of_an_engine(write_run):
    run = read_run_file(write_run({"train": {}}, local={"node": 2, "gpus": -1}))
    with pytest.raises(UsageError) as caught:
        read_options(run, "local", {"nodes": int, "gpus": int})
    assert [fault.partition(": ")[2] for fault in caught.value.faults] == [
        "local: there is no key node: did you mean nodes?",
        "local: gpus must be a whole number of at least 0, not -1",
    ]


BIG, SMALL, NONE = (
    Room("big", tuple("01234567"), (0, 1)),
    Room("small", tuple("01"), (0, 1)),
    Room("none", (), (0, 1)),
)


def test_training_takes_the_fullest_nodes_that_will_do():
    places = find_places(Role("train", 2, 2), 2, [BIG, NONE, SMALL], [])
    assert [place.node for place in places] == ["small", "big"]


def test_replicas_go_where_the_fewest_are():
    places = find_places(Role("rollout", 3, 2), 3, [SMALL, BIG], [NodeSlot("small", (), None)])
    assert places == [
        NodeSlot("big", ("0", "1"), None),
        NodeSlot("big", ("2", "3"), None),
        NodeSlot("small", ("0", "1"), None),
    ]


def test_no_room_says_what_there_is():
    with pytest.raises(NoRoom) as caught:
        find_places(
            Role("rollout", 2, 4, cpus=1, hosts=("big", "small")),
            2,
            [BIG, SMALL],
            [NodeSlot("big", ("0",), (1,))],
        )
    assert str(caught.value) == (
        "roles: rollout needs 2 replicas with 4 GPUs and 1 core each on big, small, and there is room for 1; "
        "nodes, with what is free: big 3 of 8 GPUs, 0 of 2 cores; small 2 of 2 GPUs, 2 of 2 cores"
    )
