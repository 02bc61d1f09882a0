"""`--vllm_mode colocate`: a `swift rollout` of the run's own on the device of each rank, or on those of
`--vllm_tensor_parallel_size` ranks of a machine.

The engines have a key that only this run has, and are used as any other server, with the same versions, hashes and
checks. `launch.supervisor` starts those of a machine, and ends them when the run ends. On several nodes rank 0 asks
them all: those of node 0 listen on loopback, the others on their node's address.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

from swift_r1.errors import RunFailed, ServerUnreachable
from swift_r1.flags.engine import LORA_RANKS, changed_flags
from swift_r1.flags.fields import as_words
from swift_r1.flags.parser import API_KEY_VARIABLE
from swift_r1.flags.rollout import url_of
from swift_r1.flags.run import RunFlags
from swift_r1.flags.server import LOOPBACK
from swift_r1.flags.world import World
from swift_r1.launch.environment import cpu_binding, has_gpu, own_address
from swift_r1.launch.nodes import Nodes
from swift_r1.launch.servers import wait_for_servers
from swift_r1.runtime.hardware import free_ports, usable_cpus
from swift_r1.runtime.processes import module_words, say
from swift_r1.training.room import engine_length
from swift_r1.workers.process import SupervisedProcess

SUPERVISOR_MODULE = "swift_r1.launch.supervisor"
DEFAULT_GPU_SHARE = 0.3


def own_engines(
    args: RunFlags, world: World, nodes: Nodes | None, folder: Path, by_default: bool
) -> tuple[RunFlags, str | None]:
    """Starts the engines beside the ranks of this node and waits for those of all nodes.

    Returns:
        The arguments with the engines' addresses and key, and on node 0 the leases' token. Where the user did not ask
        for engines and they do not start, the run goes on without.

    Raises:
        RunFailed, ServerUnreachable: they do not start.
    """
    if nodes is not None:
        return _on_several_nodes(args, world, nodes, folder)
    key = secrets.token_hex(16)
    urls, supervisor, check = start_engines(args, world, folder, key, LOOPBACK[0])
    started = replace(args, vllm_server_base_url=urls, api_key=key)
    try:
        return started, wait_for_servers(started, folder, check)
    except (RunFailed, ServerUnreachable) as error:
        supervisor.terminate()
        supervisor.wait()
        if not by_default:
            raise
        say(f"{error}; completions come from the trainer's own process instead (--use_vllm false)")
        alone = replace(args, use_vllm=False, vllm_mode="server")
        return replace(alone, vllm_enforce_eager=None, vllm_gpu_memory_utilization=None), None


def _on_several_nodes(
    args: RunFlags, world: World, nodes: Nodes, folder: Path
) -> tuple[RunFlags, str | None]:
    """Starts the engines of all nodes: node 0 makes the key, learns the addresses from the others, and tells all of
    them when every engine serves."""
    if world.node_rank:
        [key] = nodes.ask(["key"])
        host = own_address(str(world.master_addr))
        if host is None:
            raise RunFailed(
                f"this node has no address on the way to MASTER_ADDR {world.master_addr}"
            )
        urls, _, check = start_engines(args, world, folder, key, host)
        nodes.tell(f"engines/{world.node_rank}", json.dumps(urls))
        [addresses] = nodes.ask(["engines"], check)
        started = replace(args, vllm_server_base_url=json.loads(addresses), api_key=key)
        token = None
    else:
        key = secrets.token_hex(16)
        nodes.tell("key", key)
        urls, _, check = start_engines(args, world, folder, key, LOOPBACK[0])
        for others in nodes.ask([f"engines/{node}" for node in range(1, world.nnodes)], check):
            urls += json.loads(others)
        started = replace(args, vllm_server_base_url=urls, api_key=key)

        def check_all() -> None:
            check()
            nodes.look()

        token = wait_for_servers(started, folder, check_all)
        nodes.tell("engines", json.dumps(urls))
    return started, token


def start_engines(
    args: RunFlags, world: World, folder: Path, key: str, host: str
) -> tuple[list[str], SupervisedProcess, Callable[[], None]]:
    """Starts the engines beside the ranks of this node, without waiting for them; they listen on `host`, for who shows
    the `key`. Their logs go to the run's `folder`.

    Returns:
        The engines' addresses, the process that supervises them and ends them when it is terminated, and a check that
        raises RunFailed once that has ended because one cannot be started, which it has said.
    """
    gpu = has_gpu(os.environ)
    places = devices_of(
        world.nproc_per_node, args.vllm_tensor_parallel_size, os.environ, usable_cpus(), gpu
    )
    ports = free_ports(len(places), host)
    urls = [url_of(host, port) for port in ports]
    order = {
        "run": os.getpid(),
        "engines": [
            {
                "words": [
                    sys.executable,
                    *module_words("swift_r1", "rollout", *engine_flags(args, host, port, gpu)),
                ],
                "environ": {**os.environ, **place, API_KEY_VARIABLE: key},
                "log": str(folder / f"engine-{world.node_rank * len(places) + number}.log"),
                "url": url,
            }
            for number, (place, port, url) in enumerate(zip(places, ports, urls, strict=True))
        ],
    }
    # Through standard input: others must not read the key and the environment.
    supervisor = SupervisedProcess(
        [sys.executable, *module_words(SUPERVISOR_MODULE)], stdin=PIPE, stdout=sys.stderr
    )
    assert supervisor.stdin is not None
    supervisor.stdin.write(json.dumps(order).encode())
    supervisor.stdin.close()

    def check() -> None:
        if supervisor.poll() is not None:
            raise RunFailed(
                "--vllm_mode colocate: the engine beside the trainer could not be started (see above)"
            )

    return urls, supervisor, check


def engine_flags(args: RunFlags, host: str, port: int, gpu: bool) -> list[str]:
    """Returns the flags of `swift rollout` for this run."""
    values = {
        "model": args.model,
        "host": host,
        "port": port,
        "seed": args.seed,
        "torch_dtype": args.torch_dtype,
        "max_model_len": engine_length(args),
        "vllm_gpu_memory_utilization": (args.vllm_gpu_memory_utilization or DEFAULT_GPU_SHARE)
        if gpu
        else None,
        "batch_invariant": args.batch_invariant or None,
        "vllm_engine_kwargs": args.vllm_engine_kwargs
        | ({"enable_sleep_mode": True} if args.sleep_level else {}),
    }
    if args.vllm_enable_lora:
        needed = max(args.vllm_max_lora_rank, args.lora_rank)
        values["vllm_max_lora_rank"] = next((rank for rank in LORA_RANKS if rank >= needed), None)
    return as_words(changed_flags(args) | values)


def devices_of(
    ranks: int, each: int, environ: Mapping[str, str], cpus: Sequence[int], gpu: bool
) -> list[dict[str, str]]:
    """Returns variables that put each engine where its `each` of a node's `ranks` are: on their GPUs, or their CPUs."""
    if gpu:
        visible = [
            device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device
        ]
        name = "CUDA_VISIBLE_DEVICES"
        separator = ","
        parts = [visible[rank] if rank < len(visible) else str(rank) for rank in range(ranks)]
    else:
        name = "VLLM_CPU_OMP_THREADS_BIND"
        separator = "|"
        parts = cpu_binding(cpus, ranks).split(separator)
    starts = range(0, ranks, each)
    if not gpu and name in environ:
        return [{} for _ in starts]
    return [{name: separator.join(parts[start : start + each])} for start in starts]
