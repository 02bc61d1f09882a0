"""`--vllm_mode colocate`: whether a run gets engines of its own where the user does not say, and what a CPU makes of
their flags."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from swift_r1.errors import UsageError
from swift_r1.flags.fields import flag_specs, no_effect
from swift_r1.flags.plan import Plan
from swift_r1.flags.run import RunFlags
from swift_r1.flags.world import World
from swift_r1.launch.checks.model_folder import dtype_here
from swift_r1.launch.gpu_defaults import why_no_room
from swift_r1.runtime.hardware import GpuMemory

A = TypeVar("A", bound=RunFlags)

LEAST_MODEL_BYTES = 100 << 20
"""A smaller model spends its time in Python, where vLLM does more per token than our own engine."""
LEAST_TOKENS = 50_000
"""Half of them, since completions end early, are minutes at some hundred tokens a second; vLLM starts in about half a
minute."""
LEAST_GPU_STEPS = 20_000
"""Half of them, at an estimated 10 ms of Python each, are the 109 s that vLLM's start took on an H200 (results/gpu)."""
LEAST_COMPILED_TOKENS = 300_000
"""Compiling takes about a minute more on two cores and makes SmolLM2 1.1 to 1.4 times as fast there, which repays it
after 70,000 to 300,000 tokens (docs/performance.md)."""


def chosen(
    args: RunFlags,
    plan: Plan,
    world: World,
    gpu: bool,
    memory: GpuMemory | None = None,
    images: bool = False,
) -> tuple[RunFlags, str | None]:
    """Returns the arguments with `use_vllm` decided, and the line about it; None where the user has decided. `memory` is
    that of the GPUs, where it is known; rows have `images`."""
    if args.use_vllm is not None:
        return args, None
    why = why_own_process(args, plan, world, gpu)
    if why is None and gpu:
        why = why_no_room(args, plan.completions_per_round, world, memory, images)
    if why is not None:
        line = f"completions come from the trainer's own process (--use_vllm false): {why}"
        return replace(args, use_vllm=False), line
    line = (
        "completions come from vLLM beside the trainer (--use_vllm true --vllm_mode colocate): at most "
        f"{plan.max_tokens:,} tokens are to be generated, which repays its start; --use_vllm false leaves it out"
    )
    return replace(args, use_vllm=True, vllm_mode="colocate"), line


def compiled(args: RunFlags, plan: Plan, gpu: bool) -> tuple[RunFlags, str | None]:
    """Returns the arguments with `vllm_enforce_eager` decided for an engine beside the trainer on a CPU, and the line
    about it; None where the user has decided, or the engine does."""
    if not args.colocates or gpu or args.vllm_enforce_eager is not None:
        return args, None
    eager = plan.max_tokens < LEAST_COMPILED_TOKENS
    line = (
        f"vLLM runs {'eagerly' if eager else 'compiled'} (--vllm_enforce_eager {str(eager).lower()}): at most "
        f"{plan.max_tokens:,} tokens are to be generated, which {'does not repay' if eager else 'repays'} a minute of "
        "compiling"
    )
    return replace(args, vllm_enforce_eager=eager), line


def why_own_process(args: RunFlags, plan: Plan, world: World, gpu: bool) -> str | None:
    """Says why not to use vLLM, whatever room there is; None where nothing speaks against it."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    if world.nnodes > 1:
        return "on several nodes only --use_vllm true starts engines beside the trainer"
    if args.deterministic:
        return "--deterministic true can only be kept there"
    if args.quant_bits:
        return "4-bit weights stay where they are trained"
    size = sum(file.stat().st_size for file in Path(args.model).expanduser().glob("*.safetensors"))
    if not size:
        return "the model is not a local folder, so its size is not known"
    if size < LEAST_MODEL_BYTES:
        return f"the model is small ({size / 2**20:.0f} MiB), where vLLM is not faster"
    tokens = plan.max_tokens
    steps = (
        plan.rounds * args.max_completion_length
    )  # the trainer's own engine decodes a round at once
    if tokens < LEAST_TOKENS or (gpu and steps < LEAST_GPU_STEPS):
        return f"at most {tokens:,} tokens are to be generated, which does not repay vLLM's start"
    return None


_FLASH = {
    "flash_attention_2": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": (
        "flash_attn_interface",
        "build it in the folder hopper of flash-attention's sources",
    ),
}


def attention_of(args: A, gpu: bool) -> tuple[A, str | None]:
    """Returns the arguments with the `attn_impl` that this machine can do, and the line about another one than was
    asked for. Raises UsageError: it needs a package."""
    name = args.attn_impl
    if name in (None, "sdpa", "eager"):
        return args, None
    if gpu and args.sequence_parallel_size == 1:
        package, install = _FLASH.get(name, ("torch", ""))
        if find_spec(package) is None:
            raise UsageError(f"--attn_impl {name} needs the package {package}: {install}")
        return args, None
    why = "rows that are spread over ranks need it" if gpu else "there is no GPU"
    return replace(
        args, attn_impl="sdpa"
    ), f"--attn_impl {name}: attention is PyTorch's SDPA here, since {why}"


def without_gpu(args: A, gpu: bool) -> tuple[A, str | None]:
    """Returns the arguments, without a GPU with the defaults of the flags that mean something only there, and the line
    about it."""
    specs = flag_specs(type(args))
    unused = [name for name, spec in specs.items() if spec.info.gpu_only and getattr(args, name)]
    if gpu or not unused:
        return args, None
    line = f"{no_effect(unused, 'without a GPU')}: the run continues without"
    return replace(args, **{name: specs[name].default for name in unused}), line


def on_this_machine(args: A, gpu: bool) -> tuple[A, list[str]]:
    """Returns the arguments without what this machine cannot do, and the lines about that. Raises UsageError: a package
    is missing."""
    args, about_gpu = without_gpu(args, gpu)
    args, about_attention = attention_of(args, gpu)
    dtype, about_dtype = dtype_here(args.model, args.torch_dtype, gpu)
    lines = (about_gpu, about_attention, about_dtype)
    return replace(args, torch_dtype=dtype), [line for line in lines if line is not None]
