"""The optimizer and the learning rate's course, by the flags' names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swift_r1.errors import UsageError


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Fields are the flags of the same names."""

    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    optim: str = "adamw_torch_fused"


EIGHT_BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
"""Names of bitsandbytes' AdamW, whose moments are of 8 bits (arXiv 2110.02861)."""


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms, biases) do not, as in transformers' trainer."""
    matrices, vectors = [], []
    for parameter in parameters:
        if parameter.requires_grad:
            # Under ZeRO-3 a parameter's own shape is that of its partition.
            dims = len(getattr(parameter, "ds_shape", parameter.shape))
            (matrices if dims >= 2 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """`--optim` over parameter groups.

    Raises:
        UsageError: it is bitsandbytes', which is not installed.
    """
    if config.optim == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    adam = {"lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    if config.optim in EIGHT_BIT:
        try:
            from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
        except ImportError as error:
            raise UsageError(f"--optim {config.optim} needs bitsandbytes: {error}") from error
        return (PagedAdamW8bit if config.optim.startswith("paged") else AdamW8bit)(groups, **adam)
    # Fused: one pass over memory instead of several; on a CPU the step is bound by it.
    return torch.optim.AdamW(groups, **adam, fused=config.optim == "adamw_torch_fused")


class LearningRate:
    """The learning rate of each optimizer step, applied to an optimizer's groups.

    transformers computes the course on an optimizer of its own, so that any optimizer (DeepSpeed's
    wrappers too) only ever sees a number.
    """

    def __init__(
        self, name: str, peak: float, warmup_steps: int, total_steps: int, extra: dict[str, Any] | None = None
    ) -> None:
        from transformers import get_scheduler

        self._shadow = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
        self._scheduler = get_scheduler(
            name, self._shadow, warmup_steps, total_steps, scheduler_specific_kwargs=extra or {}
        )

    @property
    def value(self) -> float:
        """What the coming step uses."""
        return float(self._shadow.param_groups[0]["lr"])

    def go_to(self, step: int) -> None:
        """To where `step` calls of `advance` lead from the start."""
        for _ in range(step):
            self.advance()

    def apply(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            group["lr"] = self.value

    def advance(self) -> None:
        # torch warns unless the optimizer has stepped; ours steps elsewhere.
        self._shadow.step()
        self._scheduler.step()
