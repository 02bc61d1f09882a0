"""What to do about memory: the estimate for the flags of a run, and which other flags would save most."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.arguments.world import World
from swift_r1.models.shape import ModelShape, shape_of
from swift_r1.training.backends.deepspeed_config import read_config
from swift_r1.training.estimate import GIB, Estimate, changes, estimate

_LIBRARIES = {"trainer": 0.10 * GIB, "adapters": 0.05 * GIB, "deepspeed": 0.06 * GIB}
"""What a trainer has imported beside this process's torch and transformers; measured."""
_CONTEXT = 0.6 * GIB
"""What a CUDA context and its libraries take of a GPU."""


def estimated(args: RlhfArguments, shape: ModelShape, world: World, gpu: bool) -> Estimate:
    """Of these flags on this machine. Taken for its libraries is what this process holds: to be asked early."""
    stage, offload = zero_of(args)
    more = {"trainer": True, "adapters": args.train_type != "full", "deepspeed": stage is not None}
    libraries = _CONTEXT if gpu else _resident() + sum(_LIBRARIES[name] for name, on in more.items() if on)
    critic = shape_of(args.critic_model) if args.critic_model else None
    return estimate(args, shape, world.size, libraries=libraries, stage=stage, offload=offload, gpu=gpu, critic=critic)


def zero_of(args: RlhfArguments) -> tuple[int | None, tuple[bool, bool]]:
    """ZeRO's stage, None for plain torch, and whether it offloads the optimizer and the parameters."""
    if args.deepspeed is None:
        return None, (False, False)
    zero = read_config(args.deepspeed).get("zero_optimization", {})
    parts = [zero.get(key, {}).get("device", "none") for key in ("offload_optimizer", "offload_param")]
    return zero.get("stage", 0), (parts[0] not in ("none", None), parts[1] not in ("none", None))


def advice(args: RlhfArguments, shape: ModelShape, world: World, gpu: bool, found: Estimate | None = None) -> str:
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


def _resident() -> float:
    """Bytes that this process holds now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024.0
    return 0.0
