"""Whether the embedded engine samples from the distribution that the model itself has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from swift_r1.errors import UsageError
from swift_r1.models.multimodal import probe_tokens
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.wire.protocol import RolloutRequest, SamplingParams

_TOLERANCE = 1e-3
_TOLERANCE_16_BIT = 0.15
"""Largest mean difference (nats) between log-probs computed in two ways that rounding explains. In bf16 two ways of
padding differ by 0.014 (SmolLM2; single tokens by 0.09), packing by 0.036 (0.13); a leak makes it 1."""

_WINDOW = re.compile(r"(^|_)window(_size)?$|^attention_chunk_size$")
_NARROW = 4
"""Tokens of a window while a model is checked: fewer than the probes have, so that what lies beyond it matters."""


@contextmanager
def narrowed(*models: nn.Module) -> Iterator[None]:
    """Makes the models' sliding windows, where they have some, a few tokens wide, so that short probes leave them."""
    holders = [holder for model in models for holder in (_text_config(model), *model.modules())]
    kept = [
        (holder, name, value)
        for holder in holders
        for name, value in vars(holder).items()
        if _WINDOW.search(name) and isinstance(value, int) and value > _NARROW
    ]
    for holder, name, _ in kept:
        setattr(holder, name, _NARROW)
    try:
        yield
    finally:
        for holder, name, value in kept:
            setattr(holder, name, value)


@torch.no_grad()
def own_logprobs(model: nn.Module, token_ids: Tensor, attention: str | None = None) -> Tensor:
    """`[B, L - 1]` by the model's own forward pass in evaluation mode, without a cache; `attention` replaces its
    own."""
    config = _text_config(model)
    training = model.training
    before = config._attn_implementation
    config._attn_implementation = attention or before
    model.eval()
    try:
        logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1].float()
    finally:
        config._attn_implementation = before
        model.train(training)
    logprobs: Tensor = logits.log_softmax(-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    return logprobs


def last_bit(model: nn.Module, token_ids: Tensor, logprobs: Tensor) -> float:
    """Returns how much a model's log-probs (of its eager attention) change on average when its embeddings change in
    their last bit, which is what a rounding does: the probes are no text, and what it says to them may hang on that."""

    def change(_module: nn.Module, _given: Any, made: Tensor) -> Tensor:
        signs = torch.arange(made.shape[-1], device=made.device) % 2 * 2 - 1
        return made * (1 + torch.finfo(made.dtype).eps * signs).to(made.dtype)

    with cast(PreTrainedModel, model).get_input_embeddings().register_forward_hook(change):
        return (logprobs - own_logprobs(model, token_ids, "eager")).abs().mean().item()


def _text_config(model: nn.Module) -> PretrainedConfig:
    return cast(PreTrainedModel, model).config.get_text_config()


def tolerance(model: nn.Module) -> float:
    """The largest mean difference of log-probs that rounding explains in the model's dtype."""
    return _TOLERANCE if model.dtype == torch.float32 else _TOLERANCE_16_BIT


def check_engine(engine: TransformersEngine) -> None:
    """Compares a few completions of prompts of several lengths with the model's own forward pass; raises UsageError
    where they differ by more than rounding. Under ZeRO-3 each rank has a model of its own for this."""
    model = engine.model
    device = next(engine.model.parameters()).device
    differences: list[Tensor] = []
    tokens = probe_tokens(21, model.config)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [
        RolloutRequest(
            request_id=str(n),
            prompt_token_ids=tuple(tokens[n:]),
            n=2,
            seeds=(n, 7 + n),
            sampling=sampling,
        )
        for n in (0, 9, 18)
    ]
    with narrowed(model):
        for request, output in zip(requests, engine.generate(requests, 0), strict=True):
            for one in output.completions:
                token_ids = torch.tensor([request.prompt_token_ids + one.token_ids], device=device)
                own = own_logprobs(model, token_ids, "eager")[0, -len(one.token_ids) :].cpu()
                differences.append((own - torch.tensor(one.logprobs)).abs())
    difference = torch.cat(differences).mean().item()
    if not difference <= tolerance(model):
        raise UsageError(
            f"the embedded engine does not sample from {type(model).__name__} as it is (log-probs differ by "
            f"{difference:.3g} nats): use `swift rollout` with --use_vllm true"
        )
