"""The machine in words, told from the system's files so that no library has to be loaded. Linux."""

from __future__ import annotations

import glob
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GPUS = "/proc/driver/nvidia/gpus/*/information"
_GPU_DEVICES = "/dev/nvidia[0-9]*"
CPU = "/proc/cpuinfo"
_ARITHMETIC = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""The kernel's names of instructions (x86 and Arm) that multiply matrices of a dtype."""


_ASK_S = 30.0  # a driver that loads first takes some seconds


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of a GPU: all of them, and those that nothing holds."""

    total: float
    free: float


def hardware(
    environ: Mapping[str, str], gpus: str = _GPUS, devices: str = _GPU_DEVICES
) -> dict[str, Any]:
    """Returns `cpu` (its name), `cores` (that this process may use), `memory_gib`, and `gpus` (names of NVIDIA's; the
    first of them where `CUDA_VISIBLE_DEVICES` hides some)."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # A container without GPUs sees the names of its host's, but no device.
    names = (
        [_field(path, "Model") or "GPU" for path in sorted(glob.glob(gpus))]
        if glob.glob(devices)
        else []
    )
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = names[: len([one for one in visible.split(",") if one.strip() not in ("", "-1")])]
    cpu = _field(CPU, "model name") or platform.machine()
    return {"cpu": cpu, "cores": cores, "memory_gib": round(memory / 2**30, 1), "gpus": names}


def gpu_ids(environ: Mapping[str, str], devices: str = _GPU_DEVICES) -> list[str]:
    """Returns NVIDIA's GPUs that this process sees, as `CUDA_VISIBLE_DEVICES` names them."""
    count = len(glob.glob(devices))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(count)]
    return [one.strip() for one in visible.split(",") if one.strip() not in ("", "-1")][:count]


def gpu_memory(
    environ: Mapping[str, str], count: int, program: str = "nvidia-smi"
) -> GpuMemory | None:
    """Returns the memory of the first `count` GPUs that this process sees, of the one with least free; None where that
    cannot be told. Asks the driver's own program: a CUDA context of this process would take some of it."""
    words = [program, "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
    ids = gpu_ids(environ)[:count]
    if ids:
        words.append(f"--id={','.join(ids)}")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.findall(r"^(\d+), (\d+)$", done.stdout, re.MULTILINE)  # in MiB
    gpus = [GpuMemory(int(total) * 2.0**20, int(free) * 2.0**20) for total, free in found[:count]]
    return min(gpus, key=lambda gpu: gpu.free, default=None)


def cpu_multiplies(dtype: str, cpuinfo: str = CPU) -> bool:
    """Says whether the CPU has instructions for matrices of `dtype`, without which they are several times slower than
    in float32; True where the system does not say."""
    known = _field(cpuinfo, "flags") or _field(cpuinfo, "Features")
    return (
        known is None
        or dtype not in _ARITHMETIC
        or not _ARITHMETIC[dtype].isdisjoint(known.split())
    )


def _field(path: str, name: str) -> str | None:
    """Returns the first `name : text` of a file of the kernel; None without one."""
    try:
        found = re.search(
            rf"^{name}\s*:\s*(.+?)\s*$", Path(path).read_text(encoding="utf-8"), re.MULTILINE
        )
    except OSError:
        return None
    return found[1] if found else None


def usable_cpus() -> tuple[int, ...]:
    """Returns the CPUs this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def free_ports(count: int, host: str) -> list[int]:
    """Returns ports of `host`, an address of this machine, that nobody listens on now."""
    with ExitStack() as cleanup:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        probes = [cleanup.enter_context(socket.socket(family)) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
