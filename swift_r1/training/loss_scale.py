"""The dynamic loss scale of float16: small gradients are lifted out of underflow, and lowered where they overflow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INITIAL = 2.0**16
GROW_AFTER = 1000
"""Steps without an overflow after which the scale doubles; as DeepSpeed's."""


@dataclass(slots=True)
class LossScale:
    """Losses are multiplied by `scale`, gradients divided by it (arXiv 1710.03740, section 3.2).

    Attributes:
        scale: a power of two, at least 1.
        steps: optimizer steps so far, those left out too.
        last_overflow: the number of the last step that overflowed, -1 before.
    """

    scale: float = INITIAL
    steps: int = 0
    last_overflow: int = -1

    def update(self, overflow: bool) -> None:
        """After each optimizer step: halved where its gradient was not finite, doubled after a thousand that were."""
        if overflow:
            self.scale = max(self.scale / 2, 1.0)
            self.last_overflow = self.steps
        elif (good := self.steps - self.last_overflow - 1) and good % GROW_AFTER == 0:
            self.scale *= 2
        self.steps += 1

    def to_tensor(self) -> Tensor:
        """Float64 `[3]`: the fields, for a checkpoint."""
        return torch.tensor([self.scale, self.steps, self.last_overflow], dtype=torch.float64)

    @classmethod
    def of_tensor(cls, fields: Tensor) -> LossScale:
        scale, steps, last_overflow = fields.tolist()
        return cls(scale, int(steps), int(last_overflow))
