"""The policy as the trainer sees it: token ids in, log-probabilities of the completion's tokens out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from swift_r1.errors import UsageError
from swift_r1.models.attention import PackedRow, use_packed_attention
from swift_r1.models.cpu_kernels import use_block_functions
from swift_r1.models.freezing import Freezing, freeze
from swift_r1.models.logprobs import LogitForm, TokenLogprobs, selective_logprobs_and_entropies
from swift_r1.models.lora import LoraSettings, add_lora
from swift_r1.models.quantization import Quantization, settle
from swift_r1.weights.expected import use_checkpoint_form

logger = logging.getLogger("swift_r1.training")


class ModelInputs(NamedTuple):
    """`B` completions as they go through the model, each after its prompt: a row each, or packed in one row.

    Padding is on the right and attention is causal, so no real token sees it and no mask is needed.

    Attributes:
        token_ids: `[R, S]` int64, prompt then completion; `R` is `B`, or 1 where packed.
        positions: `[K]` int64 into the flattened `[R * S]` hidden states: where each of the `K` tokens that the policy
            wrote is predicted.
        targets: `[K]` int64, the tokens predicted there.
        position_ids: None, or where packed `[1, S]` int64.
        packed_row: the packed row's groups for `packed_attention`; None where rows are not packed, or where the model's
            own attention tells samples apart by position ids that start again.
    """

    token_ids: Tensor
    positions: Tensor
    targets: Tensor
    position_ids: Tensor | None = None
    packed_row: PackedRow | None = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`B` completions that go through the model together.

    Attributes:
        mask: `[B, T]` bool, True on completion tokens that the policy wrote; `mask.sum() == K`, row-major in the order
            of `targets`.
        truncated: `[B]` bool, True where the completion was cut at the length limit.
        rollout_logps: `[B, T]` float32, the engine's log-probs.
        samples: `[B]` int64 on the CPU, which completions of the round these are.
        old_logps, old_entropies: `[B, T]` float32, of the policy before the round's first update; None where nothing
            needs them.
        ref_logps: `[B, T]` float32, None without a reference policy.
        old_values: `[B, T]` float32, of the critic before the round's first update; None without a critic.
    """

    inputs: ModelInputs
    mask: Tensor
    truncated: Tensor
    rollout_logps: Tensor
    samples: Tensor
    old_logps: Tensor | None = None
    old_entropies: Tensor | None = None
    ref_logps: Tensor | None = None
    old_values: Tensor | None = None

    def unflatten(self, values: Tensor) -> Tensor:
        """`[K]` per-token values as `[B, T]`, zero on padding."""
        return torch.zeros(self.mask.shape, dtype=values.dtype, device=values.device).masked_scatter(self.mask, values)


class LogprobHead(nn.Module):
    """Holds the output head's own parameters, so that ZeRO-3 gathers them around this module's forward."""

    def __init__(self, output_embeddings: nn.Module, form: LogitForm) -> None:
        super().__init__()
        self.form = form
        self.weight = output_embeddings.weight
        self.bias = getattr(output_embeddings, "bias", None)

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> TokenLogprobs:
        return selective_logprobs_and_entropies(
            hidden, self.weight, targets, bias=self.bias, form=self.form, temperature=temperature
        )


def logit_form(config: Any) -> LogitForm:
    """What the architecture does to its logits, by the names that transformers' configs have for it.

    `check_fused_head` tells where it does something else.
    """
    scale = getattr(config, "logit_scale", None) or 1.0
    return LogitForm(
        scale / (getattr(config, "logits_scaling", None) or 1.0), getattr(config, "final_logit_softcapping", None)
    )


def chosen_states(
    model: nn.Module, token_ids: Tensor, positions: Tensor, position_ids: Tensor | None, packed_row: PackedRow | None
) -> Tensor:
    """`[K, hidden]`: the last hidden states of a transformers model, with any head, at `positions`."""
    packed: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
    if packed_row is not None:
        # A mask of four dimensions is taken as it is: none is made for the row, and `packed_attention` needs none.
        packed |= {"packed_row": packed_row, "attention_mask": token_ids.new_zeros(1, 1, 1, 1, dtype=torch.bool)}
    # Some of transformers' classes (Llama 4) misname the model under their head, and are their own base model.
    inner = model.base_model if model.base_model is not model else model.get_decoder()
    hidden: Tensor = inner(input_ids=token_ids, use_cache=False, **packed).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, positions)


class Policy(nn.Module):
    """A causal LM whose forward gives log-probs (and entropies) of chosen tokens, never `[tokens, vocabulary]`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.logprob_head = LogprobHead(model.get_output_embeddings(), logit_form(model.config.get_text_config()))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        targets: Tensor,
        position_ids: Tensor | None,
        packed_row: PackedRow | None,
        temperature: float,
    ) -> TokenLogprobs:
        """The fields of `ModelInputs`; returns `[K]` float32 each."""
        chosen = chosen_states(self.model, token_ids, positions, position_ids, packed_row)
        return self.logprob_head(chosen, targets, temperature)


def load_model(
    path: str | Path,
    dtype: str | None,
    gradient_checkpointing: bool,
    lora: LoraSettings | None = None,
    *,
    quantization: Quantization | None = None,
    freezing: Freezing | None = None,
) -> nn.Module:
    """The causal LM in `path`, in `dtype` (None: as its config says), with `lora`'s adapters where given.

    Args:
        quantization: of the weights that get no gradient.
        freezing: weights of full training that get none either.

    Raises:
        UsageError: if transformers cannot load it, or it has none of the modules to adapt or weights to freeze.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    more: dict[str, Any] = {}
    try:
        if quantization is not None:
            compute = getattr(torch, dtype) if dtype else AutoConfig.from_pretrained(path).dtype
            more["quantization_config"] = quantization.config(compute or torch.float32)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype) if dtype else "auto", **more)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"cannot load --model {path}: {str(error).splitlines()[0]}") from error
    if quantization is not None:
        settle(model)
    use_checkpoint_form(model)
    prepare(model, gradient_checkpointing)
    if lora is not None:
        add_lora(model, lora)
    if freezing is not None:
        freeze(model, freezing)
    return model


def prepare(model: nn.Module, gradient_checkpointing: bool) -> None:
    """Makes a model as `from_pretrained` gives it one to train: our attention, block functions, no dropout.

    A policy is scored as it samples. With dropout its log-probs would be those of another policy at each call.
    """
    use_packed_attention(model)
    use_block_functions(model)
    if _without_dropout(model):
        logger.info(
            "%s is trained without its dropout: log-probs are those of the policy that samples", type(model).__name__
        )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _without_dropout(model: nn.Module) -> bool:
    """Sets every rate of dropout in its modules to 0, but none in its config; whether there was one."""
    found = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            found, module.p = found or module.p > 0, 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                found = found or value > 0
                setattr(module, name, 0.0)
    return found
