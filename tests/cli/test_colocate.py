"""`--vllm_mode colocate`: which engines are started, where, and with which flags."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from swift_r1.arguments.parser import parse_arguments
from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.arguments.rollout import GenerationArguments
from swift_r1.arguments.server import RolloutArguments
from swift_r1.errors import UsageError
from swift_r1.launch.colocate import check_device, device_of, engine_flags


def arguments(**flags: Any) -> RlhfArguments:
    values = {"rlhf_type": "grpo", "model": "m", "dataset": "d", "reward_funcs": "format", "use_vllm": "true"} | flags
    values |= {"vllm_mode": "colocate", "per_device_train_batch_size": 8}
    return parse_arguments(
        RlhfArguments, [word for name, value in values.items() for word in (f"--{name}", str(value))]
    )


@pytest.mark.parametrize("gpu", [False, True])
def test_engines_take_the_runs_settings(gpu: bool) -> None:
    args = arguments(torch_dtype="float32", max_length=100, max_completion_length=50, vllm_enforce_eager="true")
    served = parse_arguments(RolloutArguments, engine_flags(args, 5555, gpu))
    assert (served.model, served.port, served.torch_dtype, served.max_model_len) == ("m", 5555, "float32", 150)
    assert served.host == "127.0.0.1" and served.vllm_enforce_eager is True
    assert served.vllm_gpu_memory_utilization == (0.3 if gpu else 0.9)
    more = arguments(vllm_max_model_len=77, vllm_engine_kwargs='{"kv_cache_memory_bytes": 1}')
    served = parse_arguments(RolloutArguments, engine_flags(more, 5555, gpu))
    assert served.max_model_len == 77 and served.vllm_engine_kwargs == {"kv_cache_memory_bytes": 1}
    assert parse_arguments(RolloutArguments, engine_flags(arguments(), 5555, gpu)).max_model_len is None
    sleeps = arguments(sleep_level=2, vllm_engine_kwargs='{"kv_cache_memory_bytes": 1}')
    served = parse_arguments(RolloutArguments, engine_flags(sleeps, 5555, gpu))
    assert served.vllm_engine_kwargs == {"kv_cache_memory_bytes": 1, "enable_sleep_mode": True}


def test_each_engine_is_on_its_ranks_device() -> None:
    cpus = (0, 1, 2, 3)
    assert [device_of(rank, 2, {}, cpus, False) for rank in (0, 1)] == [
        {"VLLM_CPU_OMP_THREADS_BIND": "0-1"},
        {"VLLM_CPU_OMP_THREADS_BIND": "2-3"},
    ]
    assert device_of(0, 1, {"VLLM_CPU_OMP_THREADS_BIND": "3"}, cpus, False) == {}
    assert device_of(1, 2, {}, cpus, True) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert device_of(1, 2, {"CUDA_VISIBLE_DEVICES": "4,7"}, cpus, True) == {"CUDA_VISIBLE_DEVICES": "7"}


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"vllm_gpu_memory_utilization": 0.5}, "--vllm_gpu_memory_utilization has no effect without a GPU: leave it"),
        (
            {"sleep_level": 1, "offload_model": "true", "offload_optimizer": "true"},
            "--sleep_level, --offload_model, --offload_optimizer have no effect without a GPU: leave them out",
        ),
        ({"tf32": "true"}, "--tf32 has no effect without a GPU: leave it out"),
    ],
)
def test_what_a_gpu_is_for_means_nothing_on_a_cpu(flags: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        check_device(arguments(**flags), gpu=False)
    check_device(arguments(**flags), gpu=True)
    check_device(arguments(), gpu=False)


def test_a_run_on_a_cpu_says_so_before_it_reads_its_data() -> None:
    words = "rlhf --rlhf_type grpo --model none --dataset none --reward_funcs none --per_device_train_batch_size 8"
    asked = "--use_vllm true --vllm_mode colocate --sleep_level 2"
    done = subprocess.run(
        [sys.executable, "-m", "swift_r1", *words.split(), *asked.split()],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--sleep_level has no effect without a GPU: leave it out" in done.stderr


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"vllm_server_host": "h"}, "whose engines have addresses and a key already"),
        ({"api_key": "k"}, "whose engines have addresses and a key already"),
        ({"async_generate": "true"}, "gains nothing with --vllm_mode colocate"),
        ({"weight_transport": "nccl"}, "needs a GPU each for trainer and engine"),
    ],
)
def test_what_contradicts_it_is_refused(flags: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        arguments(**flags)


def test_addresses_come_from_the_launcher() -> None:
    assert isinstance(arguments(), GenerationArguments) and arguments().rollout_base_urls == ()
