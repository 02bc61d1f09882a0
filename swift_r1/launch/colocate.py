"""`--vllm_mode colocate`: a `swift rollout` of the run's own for each rank of this machine, on the rank's device.

Whether a run gets one where the user does not say, and how it is started. The engines listen on loopback with a key
that only this run has, and are used as any other server, with the same versions, hashes and checks. `launch.supervisor`
starts them, and ends them when the run ends.
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
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from swift_r1.arguments.fields import flag_specs, no_effect
from swift_r1.arguments.parser import API_KEY_VARIABLE
from swift_r1.arguments.plan import Plan
from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.arguments.world import World
from swift_r1.errors import UsageError
from swift_r1.launch.environment import cpu_binding

SUPERVISOR_MODULE = "swift_r1.launch.supervisor"
DEFAULT_GPU_SHARE = 0.3
LEAST_MODEL_BYTES = 100 << 20
"""A smaller model spends its time in Python, where vLLM does more per token than our own engine."""
LEAST_TOKENS = 50_000
"""Half of them, since completions end early, are minutes at some hundred tokens a second; vLLM starts in about half a
minute."""
LEAST_COMPILED_TOKENS = 1_000_000
"""Compiling takes about a minute more on two cores and makes SmolLM2 a tenth faster there (docs/performance.md)."""


def chosen(args: RlhfArguments, plan: Plan, world: World, gpu: bool) -> tuple[RlhfArguments, str | None]:
    """The arguments with `use_vllm` decided, and the line about it; None where the user has decided."""
    if args.use_vllm is not None:
        return args, None
    if (why := why_own_process(args, plan.max_tokens, world, gpu)) is not None:
        line = f"completions come from the trainer's own process (--use_vllm false): {why}"
        return replace(args, use_vllm=False), line
    line = (
        "completions come from vLLM beside the trainer (--use_vllm true --vllm_mode colocate): at most "
        f"{plan.max_tokens:,} tokens are to be generated, which repays its start; --use_vllm false leaves it out"
    )
    return replace(args, use_vllm=True, vllm_mode="colocate"), line


def compiled(args: RlhfArguments, plan: Plan, gpu: bool) -> tuple[RlhfArguments, str | None]:
    """The arguments with `vllm_enforce_eager` decided for an engine beside the trainer on a CPU, and the line about
    it; None where the user has decided, or the engine does."""
    if not args.colocates or gpu or args.vllm_enforce_eager is not None:
        return args, None
    eager = plan.max_tokens < LEAST_COMPILED_TOKENS
    line = (
        f"vLLM runs {'eagerly' if eager else 'compiled'} (--vllm_enforce_eager {str(eager).lower()}): at most "
        f"{plan.max_tokens:,} tokens are to be generated, which {'does not repay' if eager else 'repays'} a minute of "
        "compiling"
    )
    return replace(args, vllm_enforce_eager=eager), line


def why_own_process(args: RlhfArguments, tokens: int, world: World, gpu: bool) -> str | None:
    """Why not vLLM for a run of at most `tokens` new tokens; None where nothing speaks against it."""
    if gpu:
        return "on a GPU vLLM would take a share of its memory, which only --use_vllm true gives it"
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    if world.nnodes > 1:
        return "engines beside the trainer are for one machine"
    if args.deterministic:
        return "--deterministic true can only be kept there"
    if args.quant_bits:
        return "4-bit weights stay where they are trained"
    size = sum(file.stat().st_size for file in Path(args.model).expanduser().glob("*.safetensors"))
    if not size:
        return "the model is not a local folder, so its size is not known"
    if size < LEAST_MODEL_BYTES:
        return f"the model is small ({size / 2**20:.0f} MiB), where vLLM is not faster"
    if tokens < LEAST_TOKENS:
        return f"at most {tokens:,} tokens are to be generated, which does not repay vLLM's start"
    return None


def check_device(args: RlhfArguments, gpu: bool) -> None:
    """Raises UsageError for flags that only a GPU gives a meaning."""
    unused = [name for name, spec in flag_specs(type(args)).items() if spec.info.gpu_only and getattr(args, name)]
    if unused and not gpu:
        raise UsageError(no_effect(unused, f"without a GPU: leave {'it' if len(unused) == 1 else 'them'} out"))


_FLASH = {
    "flash_attention_2": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": ("flash_attn_interface", "build it in the folder hopper of flash-attention's sources"),
}


def attention_of(args: RlhfArguments, gpu: bool) -> tuple[RlhfArguments, str | None]:
    """The arguments with the `attn_impl` that this machine can do, and the line about another one than was asked for.
    Raises UsageError: it needs a package."""
    name = args.attn_impl
    if name in (None, "sdpa", "eager"):
        return args, None
    if gpu and args.sequence_parallel_size == 1:
        package, install = _FLASH.get(name, ("torch", ""))
        if find_spec(package) is None:
            raise UsageError(f"--attn_impl {name} needs the package {package}: {install}")
        return args, None
    why = "rows that are spread over ranks need it" if gpu else "there is no GPU"
    return replace(args, attn_impl="sdpa"), f"--attn_impl {name}: attention is PyTorch's SDPA here, since {why}"


def start_engines(
    args: RlhfArguments, ranks: int, folder: Path, environ: Mapping[str, str], cpus: Sequence[int], gpu: bool
) -> tuple[RlhfArguments, subprocess.Popen[bytes]]:
    """Starts an engine for each of `ranks` processes, without waiting for them; their logs go to the run's `folder`.

    Returns:
        The arguments with the engines' addresses and key, and the process that supervises them: it ends them when it
        is terminated, and ends, having said why, where one does not start.
    """
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
    # Through standard input: others must not read the key and the environment.
    supervisor = subprocess.Popen(
        [sys.executable, "-m", SUPERVISOR_MODULE], stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True
    )
    assert supervisor.stdin is not None
    supervisor.stdin.write(json.dumps(order).encode())
    supervisor.stdin.close()
    return replace(args, vllm_server_base_url=urls, api_key=key), supervisor


def engine_flags(args: RlhfArguments, port: int, gpu: bool) -> list[str]:
    """Of `swift rollout`, for this run."""
    length = args.vllm_max_model_len
    if length is None and args.max_length and args.multi_turn_scheduler is None:
        length = args.max_length + max(args.max_completion_length, args.eval_max_completion_length or 0)
    more = args.vllm_engine_kwargs | ({"enable_sleep_mode": True} if args.sleep_level else {})
    values = {
        "model": args.model,
        "port": port,
        "seed": args.seed,
        "torch_dtype": args.torch_dtype,
        "max_model_len": length,
        "vllm_enforce_eager": None if args.vllm_enforce_eager is None else str(args.vllm_enforce_eager).lower(),
        "vllm_gpu_memory_utilization": (args.vllm_gpu_memory_utilization or DEFAULT_GPU_SHARE) if gpu else None,
        "vllm_engine_kwargs": json.dumps(more) if more else None,
    }
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]


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
        probes = [cleanup.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
