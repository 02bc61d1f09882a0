"""The critic of PPO: token ids in, the value of the state before each of the completion's tokens out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swift_r1.errors import UsageError
from swift_r1.models.attention import PackedRow
from swift_r1.models.policy import chosen_states, prepare


class ValueHead(nn.Module):
    """Holds the head's own weight `[1, hidden]`, so that ZeRO-3 gathers it around this module's forward."""

    def __init__(self, score: nn.Module) -> None:
        super().__init__()
        self.weight = score.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """`[K, hidden]` to float32 `[K]`; in float32, since in bf16 values near 1 are 0.008 apart."""
        return (hidden.float() @ self.weight.float().t()).squeeze(-1)


class Critic(nn.Module):
    """A transformers sequence classifier of one label: its `score` is applied at every token, not at the last one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.value_head = ValueHead(model.score)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        targets: Tensor,
        position_ids: Tensor | None,
        packed_row: PackedRow | None,
    ) -> Tensor:
        """The fields of `ModelInputs`; returns float32 `[K]`: at the position that predicts a token the value of the
        state before it. `targets` is not looked at."""
        return self.value_head(chosen_states(self.model, token_ids, positions, position_ids, packed_row))


def load_critic(path: str | Path, dtype: str | None, gradient_checkpointing: bool) -> nn.Module:
    """The critic in `path`: a causal LM, which gets a new head of zeros (every value is 0 at first), or a sequence
    classifier of one label, as a checkpoint's `critic/` is, with the head it has.

    Args:
        dtype: of the weights; None: as the config says.

    Raises:
        UsageError: transformers cannot load it as a classifier, or it has several labels.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        config: Any = AutoConfig.from_pretrained(path)
        trained_head = has_value_head(config)
        if trained_head and config.num_labels != 1:
            raise UsageError(f"--critic_model {path} gives {config.num_labels} numbers a token: a critic gives one")
        model = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=getattr(torch, dtype) if dtype else "auto"
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"cannot load the critic from {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise UsageError(f"{type(model).__name__} has no linear `score`: this architecture cannot be a critic yet")
    if not trained_head:
        with torch.no_grad():
            # Under ZeRO-3 each rank has its part.
            getattr(model.score.weight, "ds_tensor", model.score.weight).zero_()
    prepare(model, gradient_checkpointing)
    return model


def has_value_head(config: Any) -> bool:
    """Whether the model that this transformers config is of was saved with a classifier's head."""
    return any(name.endswith("ForSequenceClassification") for name in getattr(config, "architectures", None) or ())
