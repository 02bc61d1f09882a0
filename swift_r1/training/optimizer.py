"""The optimizer, the schedule of its learning rate, and float16's loss scale."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swift_r1.errors import UsageError
from swift_r1.flags.training import EIGHT_BIT
from swift_r1.models.multimodal import part_of_model
from swift_r1.models.weights import whole_shape
from swift_r1.training.backends.optimizer_state import start_state

# Layers are numbered; embeddings and heads, whose rows are tokens, are in none.
_IN_A_LAYER = re.compile(r"\.\d+\.")


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
    lorap_lr_ratio: float | None = None
    vit_lr: float | None = None
    aligner_lr: float | None = None

    def ratio(self, name: str) -> float:
        """Returns a parameter's learning rate as a multiple of the run's: of LoRA+ (arXiv 2402.12354) for `B`, and of a
        tower."""
        own = {"vit": self.vit_lr, "aligner": self.aligner_lr, "llm": None}[part_of_model(name)]
        ratio = 1.0 if own is None else own / self.learning_rate
        return ratio * (self.lorap_lr_ratio or 1.0) if ".lora_B." in name else ratio


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms, biases) do not, as in transformers' trainer. A group's `lr_ratio` is that of its
    rate to the learning rate (`OptimizerConfig.ratio`); `by_muon` is true of matrices in layers with `--optim muon`."""
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        dimensions = len(whole_shape(parameter))
        decay = config.weight_decay if dimensions >= 2 else 0.0
        by_muon = (
            config.optim == "muon" and dimensions == 2 and _IN_A_LAYER.search(name) is not None
        )
        if parameter.requires_grad:
            groups.setdefault((decay, config.ratio(name), by_muon), []).append(parameter)
    return [
        {"params": own, "weight_decay": decay, "lr_ratio": ratio, "by_muon": by_muon}
        for (decay, ratio, by_muon), own in groups.items()
    ]


def set_learning_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_ratio"]


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns the matrix `[A, B]` with all singular values near 1, by five steps of a Newton-Schulz iteration (Keller
    Jordan et al., "Muon", 2024): in bfloat16 on a GPU; in float32 on a CPU, where products in bfloat16 take ten times
    as long, unless it has instructions for them."""
    tall = matrix.shape[0] > matrix.shape[1]
    found: Tensor = matrix.T if tall else matrix
    found = found.to(torch.float32 if found.device.type == "cpu" else torch.bfloat16)
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = found @ found.T
        found = 3.4445 * found + (2.0315 * gram @ gram - 4.7750 * gram) @ found
    return found.T if tall else found


class Muon(torch.optim.AdamW):
    """Moves the groups `by_muon` by Muon, in steps of the size of AdamW's (arXiv 2502.16982, section 2.2), others by
    AdamW. It remembers what AdamW does: the momentum of a matrix is its `exp_avg`, and its `exp_avg_sq` stays 0."""

    MOMENTUM = 0.95  # Nesterov's

    def __init__(self, groups: list[dict[str, Any]], **adam: Any) -> None:
        super().__init__(groups, **adam)
        self._matrices = [group for group in self.param_groups if group["by_muon"]]
        self._others = [group for group in self.param_groups if not group["by_muon"]]
        start_state(
            self, (one for group in self._matrices for one in group["params"]), torch.zeros(())
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Makes an update from the gradients; returns None, or what the closure does."""
        for group in self._matrices:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._move(matrix, matrix.grad, group["lr"], group["weight_decay"])
        every = self.param_groups
        self.param_groups = self._others
        loss = super().step(closure)
        self.param_groups = every
        return loss

    def _move(self, matrix: Tensor, gradient: Tensor, rate: float, decay: float) -> None:
        state = self.state[matrix]
        state["step"] += 1
        average = state["exp_avg"].lerp_(gradient, 1 - self.MOMENTUM)
        update = orthogonal(torch.lerp(gradient, average, self.MOMENTUM))
        matrix.mul_(1 - rate * decay)
        matrix.add_(update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))


def build_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """`--optim` over parameter groups. Raises UsageError: it is bitsandbytes', which is not installed."""
    if config.optim == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    betas = (config.adam_beta1, config.adam_beta2)
    adam: dict[str, Any] = {"lr": config.learning_rate, "betas": betas, "eps": config.adam_epsilon}
    if config.optim in EIGHT_BIT:
        try:
            from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit
        except ImportError as error:
            raise UsageError(f"--optim {config.optim} needs bitsandbytes: {error}") from error
        kind: type[torch.optim.Optimizer] = (
            PagedAdamW8bit if config.optim.startswith("paged") else AdamW8bit
        )
        return kind(groups, **adam)
    if any(group["by_muon"] for group in groups):
        return Muon(groups, **adam)
    # Fused: one pass over memory instead of several; on a CPU the step is bound by it.
    return torch.optim.AdamW(groups, **adam, fused=config.optim == "adamw_torch_fused")


class LearningRate:
    """The learning rate of each optimizer step: transformers computes the schedule on an optimizer of its own, so that
    any other (DeepSpeed's wrappers too) only ever sees a number."""

    def __init__(
        self,
        name: str,
        peak: float,
        warmup_steps: int,
        total_steps: int,
        extra: dict[str, Any] | None = None,
    ) -> None:
        from transformers import get_scheduler

        self._shadow = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
        self._scheduler = get_scheduler(
            name, self._shadow, warmup_steps, total_steps, scheduler_specific_kwargs=extra or {}
        )
        self._last = total_steps - 1

    @property
    def value(self) -> float:
        """The rate of the coming step."""
        return float(self._shadow.param_groups[0]["lr"])

    def go_to(self, step: int) -> None:
        """Goes from the start to the rate of this optimizer step."""
        for _ in range(step):
            self.advance()

    def advance(self) -> None:
        """Moves to the next step, if there is one: polynomial has no rate after a warm-up of all steps."""
        if self._scheduler.last_epoch >= self._last:
            return
        # torch warns unless the optimizer has stepped; ours steps elsewhere.
        self._shadow.step()
        self._scheduler.step()


GROW_AFTER = 1000  # steps without an overflow after which the loss scale doubles; as DeepSpeed's


@dataclass(slots=True)
class LossScale:
    """Losses are multiplied by `scale`, gradients divided by it (arXiv 1710.03740, section 3.2)."""

    scale: float = 2.0**16  # a power of two, at least 1
    steps: int = 0  # optimizer steps so far, those left out too
    last_overflow: int = -1  # the number of the last step that overflowed, -1 before

    def update(self, overflow: bool) -> None:
        """After each optimizer step: halved where its gradient was not finite, doubled after a thousand that were."""
        if overflow:
            self.scale = max(self.scale / 2, 1.0)
            self.last_overflow = self.steps
        elif (good := self.steps - self.last_overflow - 1) and good % GROW_AFTER == 0:
            self.scale *= 2
        self.steps += 1
