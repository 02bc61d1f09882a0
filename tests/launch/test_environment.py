"""The environment of the processes that `swift` starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_r1.cli.rlhf import needs_no_hub
from swift_r1.flags import World
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.launch import environment
from swift_r1.launch.environment import (
    find_allocator,
    has_gpu,
    new_environment,
    server_environment,
    trainer_environment,
)

TWO = World(nproc_per_node=2)


def test_threads_are_shared_out() -> None:
    for cpus, world, threads in (
        (range(8), TWO, "4"),
        (range(1), TWO, "1"),
        (range(3), World(), "3"),
    ):
        added = trainer_environment({}, world, offline=False, cpus=tuple(cpus), gpu=True)
        assert added == {"OMP_NUM_THREADS": threads}


@pytest.mark.parametrize("flag", ["reward_model", "reward_adapters"])
def test_a_reward_model_of_a_hub_needs_it(tmp_path: Path, flag: str) -> None:
    own = {"rlhf_type": "grpo", "model": str(tmp_path), "reward_model": [str(tmp_path)]}
    assert needs_no_hub(RlhfArguments(**own))
    assert not needs_no_hub(RlhfArguments(**{**own, flag: ["somebody/judges"]}))


def test_deterministic_products_on_a_gpu() -> None:
    added = trainer_environment({}, TWO, offline=False, cpus=(0, 1), gpu=True, deterministic=True)
    assert added["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_what_the_user_sets_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "find_allocator", lambda: "/lib/libtcmalloc_minimal.so.4")
    mine = {
        "OMP_NUM_THREADS": "7",
        "GOMP_SPINCOUNT": "7",
        "LD_PRELOAD": "",
        "HF_HUB_OFFLINE": "0",
        "DS_ACCELERATOR": "cpu",
        "THP_MEM_ALLOC_ENABLE": "0",
    }
    added = trainer_environment(mine, TWO, offline=True, cpus=(0, 1), gpu=False)
    assert added == {}
    assert new_environment(mine, added, {}) == mine and not capsys.readouterr().err


def test_without_a_gpu_an_allocator_is_preloaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "find_allocator", lambda: "/lib/libtcmalloc_minimal.so.4")
    added = trainer_environment({}, TWO, offline=True, cpus=(0, 1), gpu=False)
    assert added["LD_PRELOAD"] == "/lib/libtcmalloc_minimal.so.4"
    assert added["HF_HUB_OFFLINE"] == "1"
    assert "GLIBC_TUNABLES" not in added
    assert new_environment({"A": "1"}, added, {"SWIFT_API_KEY": "key"}) == {
        "A": "1",
        **added,
        "SWIFT_API_KEY": "key",
    }
    (line,) = capsys.readouterr().err.splitlines()
    assert "LD_PRELOAD=libtcmalloc_minimal.so.4" in line and "key" not in line


def test_without_an_allocator_glibc_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_allocator", lambda: None)
    added = trainer_environment({}, TWO, offline=False, cpus=(0, 1), gpu=False)
    assert added["GLIBC_TUNABLES"].startswith("glibc.malloc.hugetlb=1:")
    assert "LD_PRELOAD" not in added


def test_the_server_binds_all_of_few_cpus() -> None:
    few = server_environment({}, offline=True, cpus=(0, 1), gpu=False)
    assert few["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in server_environment(
        {}, offline=True, cpus=range(64), gpu=False
    )
    assert server_environment({}, offline=False, cpus=(0, 1), gpu=True) == {}


def test_the_additions_can_be_preloaded() -> None:
    """A library that cannot be preloaded makes the dynamic linker complain, and slows nothing but trust."""
    added = server_environment({}, offline=False, cpus=(0,), gpu=False)
    done = subprocess.run(
        [sys.executable, "-c", "print(1)"],
        env={**os.environ, **added},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
    allocator = find_allocator()
    assert allocator is None or Path(allocator).is_file()


def test_no_visible_device_is_no_gpu() -> None:
    assert not has_gpu({"CUDA_VISIBLE_DEVICES": ""})
    assert not has_gpu({"CUDA_VISIBLE_DEVICES": "-1"})


def test_a_gpu_is_told_by_its_device_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "_GPU_DEVICES", (str(tmp_path / "nvidia[0-9]*"),))
    assert not has_gpu({})
    (tmp_path / "nvidia0").touch()
    assert has_gpu({})
