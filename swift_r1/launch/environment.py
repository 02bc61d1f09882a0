"""How our processes start: in place of this one, with an environment for allocator, threads and vLLM on a CPU.

On machines without a GPU memory traffic limits the speed, and glibc's malloc alone costs a factor of two to four. These
settings must be there before Python starts, so the launcher sets them. What the user's own environment sets is never
changed.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NoReturn

import psutil

from swift_r1.flags.world import World
from swift_r1.runtime.hardware import gpu_memory
from swift_r1.runtime.processes import module_words
from swift_r1.training.memory import card_of
from swift_r1.workers.process import SupervisedProcess

PAGE_MODULE = "swift_r1.lab.view.server"
WORKER_MODULE = "swift_r1.cli.rank"
ELASTIC_MODULE = "swift_r1.launch.elastic"
_ALLOCATORS = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libjemalloc.so.2")
_LIBRARY_FOLDERS = (
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/lib/*-linux-gnu",
)
_GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
_GLIBC_TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000:"
    "glibc.malloc.top_pad=268435456"
)
# With few cores vLLM's own choice leaves half of them idle; with many it knows about sockets and siblings.
_BIND_ALL_UP_TO = 8


def launch_training(args_json: Path, world: World, environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by that of `trainer`, so that signals and exit codes are the trainer's own."""
    module, environ = trainer(world, environ)
    replace_process(module, (str(args_json),), environ)


def trainer(world: World, environ: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
    """Returns the module that trains, which takes the path of an args.json, and its whole environment; for several
    processes torch's elastic launcher."""
    if world.size > 1:
        return ELASTIC_MODULE, environ
    return WORKER_MODULE, {
        **environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }


def start_page(folder: Path, port: int, secrets: Mapping[str, str]) -> None:
    """Starts the page of the run in `folder` (`--view true`), which prints its address once it answers, and ends with
    this process, whatever that becomes by `exec`."""
    words = module_words(PAGE_MODULE, str(folder), str(port), str(os.getpid()))
    SupervisedProcess([sys.executable, *words], os.environ | dict(secrets))


def replace_process(module: str, words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Runs `python -m module words...` in place of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *module_words(module, *words)], dict(environ))


def file_in_memory(name: str, content: object) -> str:
    """Returns the path of a JSON file that the process replacing this one can read, and that is gone with it."""
    descriptor = os.memfd_create(name, 0)
    os.write(descriptor, json.dumps(content).encode())
    os.set_inheritable(descriptor, True)
    return f"/proc/self/fd/{descriptor}"


def new_environment(
    environ: Mapping[str, str], added: Mapping[str, str], secrets: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment of a new process; a line on stderr says what is added to the user's."""
    if added:
        short = {
            "LD_PRELOAD": re.sub(r"[^:]*/", "", added.get("LD_PRELOAD", "")),
            "GLIBC_TUNABLES": "...",
        }
        shown = ", ".join(f"{name}={short.get(name, value)}" for name, value in added.items())
        print(f"environment: {shown} (set a variable yourself to override it)", file=sys.stderr)
    return {**environ, **added, **secrets}


def has_gpu(environ: Mapping[str, str]) -> bool:
    """Says whether a GPU can be used, told from device files so that no library has to be loaded."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if environ.get(name, "all").strip() in ("", "-1"):
            return False
    return any(glob.glob(pattern) for pattern in _GPU_DEVICES)


def card_here(environ: Mapping[str, str], count: int) -> float | None:
    """Returns the bytes of this machine's GPU, of which `count` train, for an estimate; None on a CPU."""
    gpu = has_gpu(environ)
    return card_of(gpu, gpu_memory(environ, count) if gpu else None)


def trainer_environment(
    environ: Mapping[str, str],
    world: World,
    *,
    offline: bool,
    cpus: Sequence[int],
    gpu: bool,
    deterministic: bool = False,
    peer: str | None = None,
) -> dict[str, str]:
    """Returns variables to add for the trainer: threads shared out between the ranks, and an allocator without a GPU.

    Args:
        offline: neither the model nor the data nor an upload needs the hub.
        cpus: the usable CPUs.
        gpu: whether training runs on GPUs.
        deterministic: `--deterministic true`.
        peer: the address of another node.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, len(cpus) // world.nproc_per_node))}
    if not gpu:
        wanted |= _allocator_variables(())
        # Threads that spin long while they wait starve each other as soon as anything else wants a core (a rollout
        # server, a second rank); threads that sleep at once wake too late for small matrices.
        wanted["GOMP_SPINCOUNT"] = "10000"
        # torch's for large tensors in huge pages: fewer faults
        wanted["THP_MEM_ALLOC_ENABLE"] = "1"
        # else DeepSpeed looks for devices and warns that it finds none
        wanted["DS_ACCELERATOR"] = "cpu"
    elif deterministic:
        # torch refuses matrix products in deterministic mode without it
        wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if world.nnodes > 1:
        # else torch warns of every address that has no name
        wanted["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        name = interface_to(peer) if peer else None
        if name:
            # gloo would take the address of this machine's name, often one that no other machine reaches.
            wanted |= {"GLOO_SOCKET_IFNAME": name} | ({"NCCL_SOCKET_IFNAME": name} if gpu else {})
    if offline:
        wanted["HF_HUB_OFFLINE"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


def own_address(host: str) -> str | None:
    """This machine's address on the way to `host`; None where that cannot be told. Sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def interface_to(host: str) -> str | None:
    """Returns the name of the network interface that reaches `host`; None where that cannot be told."""
    own = own_address(host)
    for name, addresses in psutil.net_if_addrs().items():
        if own in (item.address.partition("%")[0] for item in addresses):
            return str(name)
    return None


def server_environment(
    environ: Mapping[str, str], *, offline: bool, cpus: Sequence[int], gpu: bool, engines: int = 1
) -> dict[str, str]:
    """Returns variables to add for `swift rollout`: vLLM's CPU settings, OpenMP runtime and an allocator without a GPU.

    Args:
        engines: processes that hold a part or a copy of the model, each bound to its share of the CPUs.
    """
    wanted: dict[str, str] = {}
    if not gpu:
        openmp = Path(sys.prefix, "lib", "libiomp5.so")
        wanted |= _allocator_variables((str(openmp),) if openmp.is_file() else ())
        # Several engines on their own would all take the same ones.
        if len(cpus) <= _BIND_ALL_UP_TO or engines > 1:
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = cpu_binding(cpus, engines)
    if offline:
        wanted["HF_HUB_OFFLINE"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


def cpu_binding(cpus: Sequence[int], engines: int) -> str:
    """Writes CPUs in vLLM's syntax: ranges joined by commas, one part per engine, joined by `|` (`0-3|4-7`)."""
    return "|".join(map(cpu_ranges, cpu_shares(cpus, engines)))


def cpu_shares(cpus: Sequence[int], count: int) -> list[Sequence[int]]:
    """Returns the CPUs in `count` equal parts; where there are too few, the last ones are all of them."""
    share = max(1, len(cpus) // count)
    return [cpus[index * share : (index + 1) * share] or cpus for index in range(count)]


def find_allocator() -> str | None:
    """Returns the path of tcmalloc, else jemalloc: on the system, else unpacked into this virtual environment."""
    known = _linker_cache()
    for name in _ALLOCATORS:
        patterns = [
            *(f"{folder}/{name}" for folder in _LIBRARY_FOLDERS),
            f"{sys.prefix}/lib/allocator/**/{name}",
        ]
        found = (path for pattern in patterns for path in glob.glob(pattern, recursive=True))
        for path in (known.get(name, ""), *found):
            if os.access(path, os.R_OK):
                return os.path.abspath(path)
    return None


def _allocator_variables(preload_too: Sequence[str]) -> dict[str, str]:
    allocator = find_allocator()
    preload = [*([allocator] if allocator else []), *preload_too]
    variables = {"LD_PRELOAD": ":".join(preload)} if preload else {}
    if allocator is None:
        variables["GLIBC_TUNABLES"] = _GLIBC_TUNABLES
    return variables


def _linker_cache() -> dict[str, str]:
    """Returns library name -> path, of the allocators that the dynamic linker knows for this machine's word size."""
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if program is None:
        return {}
    listing = subprocess.run(
        [program, "-p"], capture_output=True, text=True, timeout=10, check=False
    ).stdout
    found = re.findall(r"^\s*(\S+) \(([^)]*)\) => (\S+)$", listing, re.MULTILINE)
    return {name: path for name, abi, path in found if name in _ALLOCATORS and "64" in abi}


def cpu_ranges(cpus: Sequence[int]) -> str:
    """Writes numbers of CPUs as ranges: `0-3,8`."""
    groups = groupby(enumerate(cpus), lambda pair: pair[1] - pair[0])  # the same for CPUs in a row
    runs = [[cpu for _, cpu in group] for _, group in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
