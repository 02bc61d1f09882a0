"""Which weights of full training stay as they are, by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from swift_r1.errors import UsageError
from swift_r1.models.quantization import whole_shape


@dataclass(frozen=True, slots=True)
class Freezing:
    """Fields are the flags of the same names; names are matched at their beginning, the pattern anywhere."""

    freeze_parameters: tuple[str, ...] = ()
    freeze_parameters_regex: str | None = None
    freeze_parameters_ratio: float = 0.0
    trainable_parameters: tuple[str, ...] = ()


def frozen_names(sizes: Sequence[tuple[str, int]], freezing: Freezing) -> set[str]:
    """Names of the weights that are frozen.

    The ratio is of all numbers in the model, from its first weight on: a weight is frozen where it ends within it.
    `trainable_parameters` has the last word.

    Args:
        sizes: every weight's name and how many numbers it holds, in the model's order.

    Raises:
        UsageError: a prefix or the pattern matches no weight, or none is left to train.
    """
    names = [name for name, _ in sizes]
    for flag in ("freeze_parameters", "trainable_parameters"):
        for prefix in getattr(freezing, flag):
            if not any(name.startswith(prefix) for name in names):
                raise UsageError(f"--{flag} {prefix}: no weight's name begins so; the first is {names[0]}")
    frozen = {name for name in names if name.startswith(freezing.freeze_parameters)}
    if freezing.freeze_parameters_regex is not None:
        matching = {name for name in names if re.search(freezing.freeze_parameters_regex, name)}
        if not matching:
            raise UsageError(f"--freeze_parameters_regex {freezing.freeze_parameters_regex}: no weight's name matches")
        frozen |= matching
    budget = freezing.freeze_parameters_ratio * sum(size for _, size in sizes)
    for name, size in sizes:
        budget -= size
        if budget < 0:
            break
        frozen.add(name)
    frozen = {name for name in frozen if not name.startswith(freezing.trainable_parameters)}
    if len(frozen) == len(names):
        raise UsageError("nothing is left to train: --freeze_parameters and its like freeze every weight")
    return frozen


def freeze(model: nn.Module, freezing: Freezing) -> None:
    """Freezes those of `model`, in place. Raises as `frozen_names`."""
    sizes = [(name, whole_shape(parameter).numel()) for name, parameter in model.named_parameters()]
    frozen = frozen_names(sizes, freezing)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
