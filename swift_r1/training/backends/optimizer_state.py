"""What an optimizer remembers, in one form for every backend: whole float32 tensors under parameter names.

A state that one backend wrote can be read by any other, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

MASTER = "master"
"""The float32 weight that the optimizer works on."""
MOMENTS = ("exp_avg", "exp_avg_sq")
UPDATES = "updates"
"""Name of the number of updates so far, a float32 scalar: AdamW's `step`."""

StateBucket = Sequence[tuple[str, Tensor]]
"""Float32 tensors on the CPU, named `<kind>:<parameter>`; empty on all but the main rank."""
ReadTensor = Callable[[str], Tensor]
"""Gives a tensor of a saved state by its name.

Raises:
    KeyError: the state has none of that name.
"""

_BUCKET_NUMBERS = 16 * 2**20


def state_name(kind: str, parameter: str) -> str:
    return f"{kind}:{parameter}"


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Those with a gradient, tied ones once, by name."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def parameter_buckets(model: nn.Module) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Consecutive trained parameters of at most 16 million numbers together (a larger one goes alone)."""
    bucket: list[tuple[str, nn.Parameter]] = []
    filled = 0
    for name, parameter in trained_parameters(model):
        size = getattr(parameter, "ds_numel", parameter.numel())
        if bucket and filled + size > _BUCKET_NUMBERS:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, parameter))
        filled += size
    if bucket:
        yield bucket


def start_adamw(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], updates: Tensor) -> None:
    """Gives the parameters of a fresh AdamW a state of zero moments after `updates` updates."""
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": updates.to(parameter.device, torch.float32, copy=True),
            **{kind: torch.zeros_like(parameter, dtype=torch.float32) for kind in MOMENTS},
        }


def updates_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """How many updates an AdamW has made; they are the same for all its parameters."""
    for state in optimizer.state.values():
        return torch.as_tensor(state["step"], dtype=torch.float32).detach().to("cpu", copy=True)
    return torch.zeros(())
