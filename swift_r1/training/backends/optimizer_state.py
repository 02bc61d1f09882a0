"""What an optimizer remembers, in one form for every backend: whole float32 tensors under parameter names.

A state that one backend wrote can be read by any other, on any number of ranks. The moments of an 8-bit optimizer are
the exception: their codes belong to blocks of one rank's part and are kept as they are, since rounding them again would
not give the same codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swift_r1.models.weights import bucketed, whole_shape
from swift_r1.runtime.ranks import Ranks

MASTER = "master"  # the float32 weight that the optimizer works on
MOMENTS = ("exp_avg", "exp_avg_sq")
UPDATES = "updates"  # name of the number of updates so far, a float32 scalar: AdamW's `step`
LOSS_SCALE = "loss_scale"  # name of float16's loss scale, float64 `[3]`: the fields of `LossScale`
_CODES = ("state1", "state2", "absmax1", "absmax2")

StateBucket = Sequence[tuple[str, Tensor]]
"""Tensors on the CPU (float32 except codes), named `<kind>:<parameter>`; empty on all ranks but one."""


class ReadTensor(Protocol):
    def __call__(self, name: str, rows: slice = slice(None)) -> Tensor:
        """A tensor of a saved state by its name, or these rows of it. Raises KeyError where there is none."""


_BUCKET_NUMBERS = 16 * 2**20


def state_name(kind: str, parameter: str) -> str:
    return f"{kind}:{parameter}"


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Yields the parameters with a gradient, tied ones once, by name."""
    return [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]


def state_buckets(
    model: nn.Module, kinds: Sequence[str]
) -> Iterator[list[tuple[str, str, nn.Parameter]]]:
    """Each trained parameter once per kind, `(kind, name, parameter)`, in buckets of at most 16 million numbers (a
    larger one goes alone)."""
    items = ((kind, name, one) for name, one in trained_parameters(model) for kind in kinds)
    return bucketed(items, lambda item: whole_shape(item[2]).numel(), _BUCKET_NUMBERS)


def moments_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Returns which of a parameter's moments `optimizer` keeps in float32 under its own name."""
    return MOMENTS if isinstance(optimizer, torch.optim.AdamW) else ()


def start_state(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], updates: Tensor
) -> None:
    """Gives the parameters of a fresh optimizer a state of zero moments after `updates` updates."""
    kinds = moments_of(optimizer)
    for parameter in parameters if kinds else ():
        optimizer.state[parameter] = {
            "step": updates.to(parameter.device, torch.float32, copy=True),
            **{kind: torch.zeros_like(parameter, dtype=torch.float32) for kind in kinds},
        }


def updates_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """Returns how many updates an AdamW has made, the same for all its parameters; 0 where the optimizer does not
    count."""
    for state in optimizer.state.values():
        if "step" in state:
            return torch.as_tensor(state["step"], dtype=torch.float32).detach().to("cpu", copy=True)
    return torch.zeros(())


def codes_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], ranks: Ranks, replicated: bool
) -> Iterator[StateBucket]:
    """The moments of an 8-bit optimizer of these parameters as they are, where they are `replicated` once; nothing for
    another (collective)."""
    for number, parameter in enumerate(parameters if _is_eight_bit(optimizer) else ()):
        found = []
        for kind in _CODES:
            own = optimizer.state.get(parameter, {}).get(kind, torch.zeros(0, dtype=torch.uint8))
            # As bytes: small parameters have float32 moments on the rank where they are.
            own = own.detach().cpu().flatten().view(torch.uint8)
            parts = ([own] if ranks.is_rank0 else ()) if replicated else ranks.gather(own) or ()
            found += [
                (_code_name(kind, number, rank), part.clone()) for rank, part in enumerate(parts)
            ]
        yield found


@torch.no_grad()
def load_codes(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], rank: int, read: ReadTensor
) -> None:
    """Goes on from `codes_of` of as many ranks; does nothing for another optimizer. Raises KeyError, RuntimeError: it
    is the state of other parameters or another number of ranks."""
    eight_bit: Any = optimizer
    updates = int(read(UPDATES))
    for number, parameter in enumerate(parameters if _is_eight_bit(optimizer) and updates else ()):
        group = eight_bit.param_groups[0]
        # It finds its parameter through the group, which under ZeRO-3 is only filled during a step.
        kept, group["params"] = group["params"], [parameter]
        eight_bit.init_state(group, parameter, 0, 0)
        group["params"] = kept
        state = eight_bit.state[parameter]
        state["step"] = updates
        for kind in _CODES:
            saved = read(_code_name(kind, number, rank))
            if kind in state:
                state[kind].copy_(saved.view(state[kind].dtype).view(state[kind].shape))


def _is_eight_bit(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(optimizer, "init_state")  # bitsandbytes' base class


def _code_name(kind: str, number: int, rank: int) -> str:
    return f"{kind}:{number}:{rank}"
