"""The policy as the trainer sees it: token ids in, log-probabilities of the completion's tokens out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from swift_r1.errors import UsageError
from swift_r1.training.logprobs import TokenLogprobs, selective_logprobs_and_entropies

if TYPE_CHECKING:
    from swift_r1.training.backends.base import Backend

_PROBE_TOLERANCE = 0.05
"""Largest difference (nats) between fused and plain log-probs that bf16 rounding explains."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`B` completions that go through the model together, each after its prompt: a row each, or packed in one row.

    Padding is on the right and attention is causal, so no real token sees it and no mask is needed. In a packed
    row the position ids start again at each sample, from which transformers makes a block-diagonal mask (flash
    attention: sequences of their own).

    Attributes:
        token_ids: `[R, S]` int64, prompt then completion; `R` is `B`, or 1 where packed.
        position_ids: None, or where packed `[1, S]` int64.
        positions: `[K]` int64 into the flattened `[R * S]` hidden states: where each of the `K` completion
            tokens is predicted.
        targets: `[K]` int64, the tokens predicted there.
        mask: `[B, T]` bool, True on completion tokens; `mask.sum() == K`, row-major in the order of `targets`.
        truncated: `[B]` bool, True where the completion was cut at the length limit.
        rollout_logps: `[B, T]` float32, the engine's log-probs.
        samples: `[B]` int64 on the CPU, which completions of the round these are.
    """

    token_ids: Tensor
    position_ids: Tensor | None
    positions: Tensor
    targets: Tensor
    mask: Tensor
    truncated: Tensor
    rollout_logps: Tensor
    samples: Tensor

    def unflatten(self, values: Tensor) -> Tensor:
        """`[K]` per-token values as `[B, T]`, zero on padding."""
        return torch.zeros(self.mask.shape, dtype=values.dtype, device=values.device).masked_scatter(self.mask, values)


class LogprobHead(nn.Module):
    """Holds the output head's own parameters, so that ZeRO-3 gathers them around this module's forward."""

    def __init__(self, output_embeddings: nn.Module) -> None:
        super().__init__()
        self.weight = output_embeddings.weight
        self.bias = getattr(output_embeddings, "bias", None)

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> TokenLogprobs:
        return selective_logprobs_and_entropies(hidden, self.weight, targets, bias=self.bias, temperature=temperature)


class Policy(nn.Module):
    """A causal LM whose forward gives log-probs (and entropies) of chosen tokens, never `[tokens, vocabulary]`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.logprob_head = LogprobHead(model.get_output_embeddings())

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        targets: Tensor,
        temperature: float,
        position_ids: Tensor | None = None,
    ) -> TokenLogprobs:
        """Shapes as in `MicroBatch`; returns `[K]` float32 each."""
        packed = {} if position_ids is None else {"position_ids": position_ids}
        hidden = self.model.base_model(input_ids=token_ids, use_cache=False, **packed).last_hidden_state
        chosen = hidden.flatten(0, 1).index_select(0, positions)
        return self.logprob_head(chosen, targets, temperature)

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        """The model's parameters under their Hugging Face names, tied ones once."""
        return list(self.model.named_parameters())


def load_model(path: str | Path, dtype: str | None, gradient_checkpointing: bool) -> nn.Module:
    """The causal LM in `path`, in `dtype` (None: as its config says).

    Raises:
        UsageError: if transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype) if dtype else "auto")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"cannot load --model {path}: {str(error).splitlines()[0]}") from error
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def check_fused_head(backend: Backend, vocab_size: int, device: torch.device) -> None:
    """Refuses an architecture whose logits are not just `head(hidden)`, rather than train on wrong numbers.

    Compares fused log-probs of a few tokens with those from the model's own logits. Collective.

    Raises:
        UsageError: if they differ by more than rounding.
    """
    token_ids = (torch.arange(1, 9, device=device) * 7919 % vocab_size)[None]
    with torch.no_grad():
        fused = backend.logprobs(token_ids, torch.arange(7, device=device), token_ids[0, 1:], 1.0).logps
        logits = backend.model(input_ids=token_ids, use_cache=False).logits[0, :-1].float()
        plain = logits.log_softmax(-1).gather(-1, token_ids[0, 1:, None]).squeeze(-1)
    difference = (fused - plain).abs().max().item()
    if not difference <= _PROBE_TOLERANCE:
        raise UsageError(
            f"{type(backend.model).__name__} changes its logits after the output head (soft cap or scale): "
            f"log-probs differ by {difference:.3g} nats; this architecture is not supported yet"
        )


def check_packing(backend: Backend, vocab_size: int, device: torch.device) -> None:
    """Refuses `--packing true` for an architecture that does not keep a row's samples apart. Collective.

    Layers other than full attention are refused by name; then log-probs of two samples in one row are compared
    with those of a row each.

    Raises:
        UsageError: if a sample's log-probs depend on what stands before it.
    """
    name = type(backend.model).__name__
    kinds = set(getattr(backend.model.config.get_text_config(), "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise UsageError(f"--packing true is for full attention only, and {name} has {', '.join(sorted(kinds))} layers")
    rows = (torch.arange(1, 17, device=device) * 7919 % vocab_size).view(2, 8)
    targets = rows[:, 1:].flatten()
    places = torch.arange(16, device=device).view(2, 8)[:, :-1].flatten()
    with torch.no_grad():
        apart = backend.logprobs(rows, places, targets, 1.0).logps
        restarts = torch.arange(8, device=device).repeat(2)[None]
        together = backend.logprobs(rows.view(1, 16), places, targets, 1.0, restarts).logps
    difference = (apart - together).abs().max().item()
    if not difference <= _PROBE_TOLERANCE:
        raise UsageError(
            f"--packing true: {name} lets a packed sample see the one before it (log-probs differ by "
            f"{difference:.3g} nats); leave it out"
        )
