"""The environment in which vLLM's CPU engine runs well.

The engine lives in processes of its own, started afresh, so what is set here reaches them even where it
must stand before a process starts (LD_PRELOAD). A variable that the user has set is left alone.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_TCMALLOC = ("/usr/lib/*/libtcmalloc_minimal.so.4", "/usr/lib*/libtcmalloc_minimal.so.4", "/usr/lib/*/libtcmalloc.so.4")
# With few cores, vLLM's choice (one core of each pair, one kept for its scheduler) leaves half of them idle.
_BIND_ALL_UP_TO = 8


def engine_environment(
    environment: Mapping[str, str], has_gpu: bool, eager: bool, cpus: set[int], prefix: Path
) -> dict[str, str]:
    """Variables to add for the engine's processes.

    Args:
        environment: the present one.
        has_gpu: with a GPU only the start method is set.
        eager: nothing is to be compiled; else one helper of the sampler would be, 10 s at the first request.
        cpus: processor numbers that this process may use.
        prefix: the Python environment's folder, where `lib/libiomp5.so` may be.
    """
    wanted = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not has_gpu:
        if len(cpus) <= _BIND_ALL_UP_TO:
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(cpu) for cpu in sorted(cpus))
        if eager:
            wanted["TORCH_COMPILE_DISABLE"] = "1"
        wanted |= _preload(environment, prefix)
    return {name: value for name, value in wanted.items() if name == "LD_PRELOAD" or name not in environment}


def _preload(environment: Mapping[str, str], prefix: Path) -> dict[str, str]:
    """LD_PRELOAD with a faster allocator and OpenMP runtime in front, those that are there and not yet named."""
    present = environment.get("LD_PRELOAD", "")
    found = []
    if "malloc" not in present:
        found += [path for pattern in _TCMALLOC for path in sorted(glob.glob(pattern))][:1]
    openmp = prefix / "lib" / "libiomp5.so"
    if "libiomp" not in present and openmp.is_file():
        found.append(str(openmp))
    return {"LD_PRELOAD": ":".join(found + ([present] if present else []))} if found else {}


def apply_engine_environment(has_gpu: bool, eager: bool) -> str:
    """Sets the variables in this process, for its children; returns one line that says which."""
    added = engine_environment(os.environ, has_gpu, eager, os.sched_getaffinity(0), Path(sys.prefix))
    os.environ.update(added)
    return "engine environment: " + (" ".join(f"{name}={value}" for name, value in added.items()) or "as it is")
