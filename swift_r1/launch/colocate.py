"""`--vllm_mode colocate`: a `swift rollout` of the run's own for each rank of this machine, on the rank's device.

They listen on loopback with a key that only this run has, and are asked and pushed to as any other servers are, with
the same versions, hashes and checks. `swift_r1.launch.supervisor` starts them, and ends them when the run ends.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from swift_r1.arguments.rlhf import API_KEY_VARIABLE, RlhfArguments
from swift_r1.errors import RunFailed, UsageError
from swift_r1.launch.environment import cpu_binding

KEEPER_MODULE = "swift_r1.launch.supervisor"
DEFAULT_GPU_SHARE = 0.3


@dataclass(frozen=True)
class Engines:
    """What was started: the arguments with the engines' addresses and key, and the process that keeps them."""

    args: RlhfArguments
    keeper: subprocess.Popen[bytes]

    def check(self) -> None:
        """Raises RunFailed where the keeper has given them up; it has said why."""
        if self.keeper.poll() is not None:
            raise RunFailed("--vllm_mode colocate: the engine beside the trainer could not be started (see above)")

    def end(self) -> None:
        """Ends the keeper, which ends them."""
        self.keeper.terminate()
        self.keeper.wait()


def start_engines(
    args: RlhfArguments, ranks: int, folder: Path, environ: Mapping[str, str], cpus: Sequence[int], gpu: bool
) -> Engines:
    """Starts an engine for each of `ranks` processes, without waiting for them; their logs go to the run's `folder`."""
    key = secrets.token_hex(16)
    ports = free_ports(ranks)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    order = {
        "run": os.getpid(),
        "engines": [
            {
                "words": [sys.executable, "-m", "swift_r1", "rollout", *engine_flags(args, port, gpu)],
                "environ": {**environ, **device_of(rank, ranks, environ, cpus, gpu), API_KEY_VARIABLE: key},
                "log": str(folder / f"engine-{rank}.log"),
                "url": url,
            }
            for rank, (port, url) in enumerate(zip(ports, urls, strict=True))
        ],
    }
    # Through its standard input: neither key nor environment is for others to read.
    keeper = subprocess.Popen(
        [sys.executable, "-m", KEEPER_MODULE], stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True
    )
    assert keeper.stdin is not None
    keeper.stdin.write(json.dumps(order).encode())
    keeper.stdin.close()
    return Engines(replace(args, vllm_server_base_url=urls, api_key=key), keeper)


def check_device(args: RlhfArguments, gpu: bool) -> None:
    """Raises UsageError for flags that only a GPU gives a meaning."""
    names = ("vllm_gpu_memory_utilization", "sleep_level", "offload_model", "offload_optimizer")
    unused = [f"--{name}" for name in names if getattr(args, name)]
    if unused and not gpu:
        verb, them = ("has", "it") if len(unused) == 1 else ("have", "them")
        raise UsageError(f"{', '.join(unused)} {verb} no effect without a GPU: leave {them} out")


def engine_flags(args: RlhfArguments, port: int, gpu: bool) -> list[str]:
    """Of `swift rollout`, for this run."""
    values = {"model": args.model, "port": port, "seed": args.seed}
    if args.torch_dtype is not None:
        values["torch_dtype"] = args.torch_dtype
    length = args.vllm_max_model_len
    if length is None and args.max_length and args.multi_turn_scheduler is None:
        length = args.max_length + max(args.max_completion_length, args.eval_max_completion_length or 0)
    if length is not None:
        values["max_model_len"] = length
    if args.vllm_enforce_eager is not None:
        values["vllm_enforce_eager"] = str(args.vllm_enforce_eager).lower()
    if gpu:
        values["vllm_gpu_memory_utilization"] = args.vllm_gpu_memory_utilization or DEFAULT_GPU_SHARE
    more = args.vllm_engine_kwargs | ({"enable_sleep_mode": True} if args.sleep_level else {})
    if more:
        values["vllm_engine_kwargs"] = json.dumps(more)
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def device_of(rank: int, ranks: int, environ: Mapping[str, str], cpus: Sequence[int], gpu: bool) -> dict[str, str]:
    """Variables that put an engine where its rank is: on its GPU, or on its share of the CPUs."""
    if gpu:
        visible = [one for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        return {"CUDA_VISIBLE_DEVICES": visible[rank] if rank < len(visible) else str(rank)}
    if "VLLM_CPU_OMP_THREADS_BIND" in environ:
        return {}
    return {"VLLM_CPU_OMP_THREADS_BIND": cpu_binding(cpus, ranks).split("|")[rank]}


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    with ExitStack() as cleanup:
        found = []
        for _ in range(count):
            probe = cleanup.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(int(probe.getsockname()[1]))
        return found
