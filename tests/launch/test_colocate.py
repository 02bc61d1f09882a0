"""`--vllm_mode colocate`: which engines are started, where, and with which flags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.plan import make_plan, plan_table
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.rollout import GenerationArguments
from swift_r1.flags.server import RolloutArguments
from swift_r1.launch.colocate import without_gpu
from swift_r1.launch.colocated_servers import devices_of, engine_flags
from swift_r1.serving.engines.vllm_start import engine_arguments


def arguments(processes: int = 1, **flags: Any) -> RlhfArguments:
    values = {
        "rlhf_type": "grpo",
        "model": "m",
        "dataset": "d",
        "reward_funcs": "format",
        "use_vllm": "true",
    } | flags
    values |= {"vllm_mode": "colocate", "per_device_train_batch_size": 8}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return parse_arguments(RlhfArguments, words, {"NPROC_PER_NODE": str(processes)})


@pytest.mark.parametrize("gpu", [False, True])
def test_engines_take_the_runs_settings(gpu: bool) -> None:
    args = arguments(
        torch_dtype="float32", max_length=100, max_completion_length=50, vllm_enforce_eager="true"
    )
    served = parse_arguments(RolloutArguments, engine_flags(args, "127.0.0.1", 5555, gpu))
    assert (served.model, served.port, served.torch_dtype, served.max_model_len) == (
        "m",
        5555,
        "float32",
        150,
    )
    assert served.host == "127.0.0.1" and served.vllm_enforce_eager is True
    assert served.vllm_gpu_memory_utilization == (0.3 if gpu else 0.9)
    more = arguments(vllm_max_model_len=77, vllm_engine_kwargs='{"kv_cache_memory_bytes": 1}')
    served = parse_arguments(RolloutArguments, engine_flags(more, "127.0.0.1", 5555, gpu))
    assert served.max_model_len == 77 and served.vllm_engine_kwargs == {"kv_cache_memory_bytes": 1}
    assert (
        parse_arguments(
            RolloutArguments, engine_flags(arguments(), "127.0.0.1", 5555, gpu)
        ).max_model_len
        is None
    )
    sleeps = arguments(sleep_level=2, vllm_engine_kwargs='{"kv_cache_memory_bytes": 1}')
    served = parse_arguments(RolloutArguments, engine_flags(sleeps, "127.0.0.1", 5555, gpu))
    assert served.vllm_engine_kwargs == {"kv_cache_memory_bytes": 1, "enable_sleep_mode": True}


@pytest.mark.parametrize("gpu", [False, True])
def test_engines_take_every_engine_flag(gpu: bool) -> None:
    given = {
        "vllm_tensor_parallel_size": 2,
        "vllm_enable_prefix_caching": "false",
        "vllm_max_num_seqs": 7,
        "vllm_kv_cache_dtype": "fp8",
        "vllm_disable_custom_all_reduce": "true",
        "vllm_disable_cascade_attn": "true",
        "vllm_limit_mm_per_prompt": '{"image": 3}',
    }
    args = arguments(2, deepspeed="zero2", **given)
    served = parse_arguments(RolloutArguments, engine_flags(args, "127.0.0.1", 5555, gpu))
    expected = {
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
        "max_num_seqs": 7,
        "kv_cache_dtype": "fp8",
        "disable_custom_all_reduce": True,
        "disable_cascade_attn": True,
        "limit_mm_per_prompt": {"image": 3, "video": 0, "audio": 0},
    }
    made = engine_arguments(replace(served, torch_dtype="float32"), gpu)
    assert expected.items() <= made.items() and "language_model_only" not in made
    assert "max_num_seqs 7" in plan_text(args) and "one engine for 2 ranks" in plan_text(args)


def test_an_engine_on_a_cpu_computes_in_its_own_process() -> None:
    """Where it can: several workers need processes, and a GPU's engine chooses itself."""

    def executor(gpu: bool, **flags: object) -> object:
        served = parse_arguments(
            RolloutArguments, engine_flags(arguments(2, **flags), "127.0.0.1", 5555, gpu)
        )
        return engine_arguments(replace(served, torch_dtype="float32"), gpu).get(
            "distributed_executor_backend"
        )

    assert str(executor(False)).endswith(".UniProcExecutor")
    assert (
        executor(True) is None
        and executor(False, vllm_tensor_parallel_size=2, deepspeed="zero2") is None
    )
    assert executor(False, vllm_engine_kwargs='{"pipeline_parallel_size": 2}') is None


def plan_text(args: RlhfArguments) -> str:
    table = plan_table(make_plan(args, 2, 100), args)
    return " ".join(str(cell) for column in table.columns for cell in column.cells)


def test_adapters_go_to_engines_that_take_their_rank() -> None:
    args = arguments(train_type="lora", lora_rank=24, vllm_enable_lora="true")
    served = parse_arguments(RolloutArguments, engine_flags(args, "127.0.0.1", 5555, False))
    assert served.vllm_enable_lora and served.vllm_max_lora_rank == 32
    assert arguments(vllm_enable_lora="false").vllm_enable_lora is False


def test_each_engine_is_on_its_ranks_devices() -> None:
    name, cpus = "VLLM_CPU_OMP_THREADS_BIND", (0, 1, 2, 3)
    assert devices_of(2, 1, {}, cpus, False) == [{name: "0-1"}, {name: "2-3"}]
    assert devices_of(4, 2, {}, cpus, False) == [{name: "0|1"}, {name: "2|3"}]
    assert devices_of(2, 1, {name: "3"}, cpus, False) == [{}, {}]
    name = "CUDA_VISIBLE_DEVICES"
    assert devices_of(2, 1, {}, cpus, True) == [{name: "0"}, {name: "1"}]
    assert devices_of(4, 2, {name: "4,7,8,9"}, cpus, True) == [{name: "4,7"}, {name: "8,9"}]


def test_what_a_gpu_is_for_is_left_out_on_a_cpu() -> None:
    flags = {"sleep_level": 1, "offload_model": "true", "vllm_gpu_memory_utilization": 0.5}
    asked = arguments(**flags)
    args, line = without_gpu(asked, gpu=False)
    assert args == arguments()
    assert line is not None and line.startswith(
        "--vllm_gpu_memory_utilization, --sleep_level, --offload_model have no"
    )
    assert without_gpu(asked, gpu=True) == (asked, None) and without_gpu(args, gpu=False) == (
        args,
        None,
    )


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"vllm_server_host": "h"}, "whose engines have addresses and a key already"),
        ({"api_key": "k"}, "whose engines have addresses and a key already"),
        ({"async_generate": "true"}, "gains nothing with --vllm_mode colocate"),
        ({"weight_transport": "nccl"}, "needs a GPU each for trainer and engine"),
        (
            {"vllm_tensor_parallel_size": 2},
            "--vllm_tensor_parallel_size 2 does not divide the 1 processes of a machine",
        ),
        (
            {"vllm_enable_lora": "true"},
            "--vllm_enable_lora has no effect without --train_type lora",
        ),
        (
            {"vllm_max_lora_rank": 32},
            "--vllm_max_lora_rank has no effect without --vllm_enable_lora true",
        ),
        (
            {"vllm_engine_kwargs": '{"max_num_seqs": 3}'},
            "holds 'max_num_seqs': use --vllm_max_num_seqs",
        ),
        (
            {"vllm_engine_kwargs": '{"quantization": "fp8"}'},
            "holds 'quantization', which is ours: weights come from",
        ),
        (
            {"train_type": "lora", "vllm_enable_lora": "true", "sleep_level": 2},
            "--sleep_level 2 discards what --vllm_enable_lora true puts adapters over",
        ),
    ],
)
def test_what_contradicts_it_is_refused(flags: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        arguments(**flags)


def test_addresses_come_from_the_launcher() -> None:
    assert isinstance(arguments(), GenerationArguments) and arguments().rollout_base_urls == ()
