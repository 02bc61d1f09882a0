"""Memory: how much this process has used at most, and which flags would save most (from `estimate.py`)."""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.arguments.world import World
from swift_r1.models.shape import ModelShape, shape_of
from swift_r1.training.backends.deepspeed_config import read_config
from swift_r1.training.estimate import GIB, MemoryEstimate, changes, estimate

_LIBRARIES = {"trainer": 0.10 * GIB, "adapters": 0.05 * GIB, "deepspeed": 0.06 * GIB}
"""What a trainer has imported beside this process's torch and transformers; measured."""
_CONTEXT = 0.6 * GIB
"""What a CUDA context and its libraries take of a GPU."""


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held: of the GPU, or of the host where there is none.

    From the kernel's high-water mark of this program's own memory; getrusage's is inherited from the program before it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    marks = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * next(marks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def out_of_memory(error: BaseException) -> str | None:
    """What did not fit, in words, where `error` says that memory is full; None for other errors."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, torch.OutOfMemoryError):
        tried = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
        return f"{tried[1]} more did not fit on the GPU" if tried else "the GPU is full"
    if isinstance(error, MemoryError):
        return text or "Python got no more memory"
    # torch has no class of its own for this on a CPU.
    if type(error) is RuntimeError and "DefaultCPUAllocator" in text:
        tried = re.search(r"allocate (\d+) bytes", text)
        return f"{int(tried[1]) / GIB:.2f} GiB more could not be allocated" if tried else text
    return None


def estimated(args: RlhfArguments, shape: ModelShape, world: World, gpu: bool) -> MemoryEstimate:
    """For these flags on this machine. What this process holds counts as libraries, so it must be asked early."""
    stage, offload = zero_of(args)
    more = {"trainer": True, "adapters": args.train_type != "full", "deepspeed": stage is not None}
    own = psutil.Process().memory_info().rss + sum(_LIBRARIES[name] for name, on in more.items() if on)
    libraries = _CONTEXT if gpu else own
    critic = shape_of(args.critic_model) if args.critic_model else None
    return estimate(args, shape, world.size, libraries, stage, offload=offload, gpu=gpu, critic=critic)


def zero_of(args: RlhfArguments) -> tuple[int | None, tuple[bool, bool]]:
    """ZeRO's stage, None for plain torch, and whether it offloads the optimizer and the parameters."""
    if args.deepspeed is None:
        return None, (False, False)
    zero = read_config(args.deepspeed).get("zero_optimization", {})
    parts = [zero.get(key, {}).get("device", "none") for key in ("offload_optimizer", "offload_param")]
    return zero.get("stage", 0), (parts[0] not in ("none", None), parts[1] not in ("none", None))


def advice(args: RlhfArguments, shape: ModelShape, world: World, gpu: bool, found: MemoryEstimate | None = None) -> str:
    """The largest part, and the two flags that would save most, of those that save a twentieth or more."""
    found = found or estimated(args, shape, world, gpu)
    savings = {flag: found.peak - estimated(other, shape, world, gpu).peak for flag, other in changes(args)}
    worth = (found.peak - found.parts["libraries"]) / 20
    best = [flag for flag in sorted(savings, key=savings.__getitem__, reverse=True) if savings[flag] > worth]
    largest = f"the largest part is {found.largest} ({found.counted[found.largest] / GIB:.2f} GiB)"
    if not best:
        return f"{largest}; no flag would save much"
    tips = " and ".join(f"{flag} (saves {savings[flag] / GIB:.2f} GiB)" for flag in best[:2])
    return f"{largest}; what would help most: {tips}"


def advice_for(args_json: Mapping[str, Any], world: World, gpu: bool) -> str:
    """`advice` for the content of an args.json."""
    args = RlhfArguments.from_dict(args_json["args"])
    return advice(args, shape_of(args.model), world, gpu)
