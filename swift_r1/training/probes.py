"""What is tried on a model before it is trained: whether log-probs come out right in the forms we compute them in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from swift_r1.arguments import RlhfArguments
from swift_r1.errors import UsageError
from swift_r1.training.attention import takes_packed_rows
from swift_r1.training.backends.base import Backend, CriticBackend, Training
from swift_r1.training.batching import Cut, collate, round_batch
from swift_r1.training.distributed import Ranks
from swift_r1.training.micro_batches import LEAST_SAVING, SHARED, Form
from swift_r1.training.policy import ModelInputs

logger = logging.getLogger(__name__)

_PROBE_TOLERANCE = 0.05
"""Largest difference (nats) between fused and plain log-probs that bf16 rounding explains."""

_PACKED_TOLERANCE, _PACKED_TOLERANCE_16_BIT = 1e-3, 0.15
"""Largest mean difference (nats) between packed and padded log-probs that rounding explains. In bf16 two ways of
padding differ by 0.014 (SmolLM2; single tokens by 0.09), packing by 0.036 (0.13); a leak makes it 1."""


def check_fused_head(backend: Backend, vocab_size: int, device: torch.device) -> None:
    """Refuses an architecture whose logits are not what `logit_form` says, rather than train on wrong numbers.

    Compares fused log-probs of a few tokens with those from the model's own logits. Collective.

    Raises:
        UsageError: if they differ by more than rounding.
    """
    token_ids = (torch.arange(1, 9, device=device) * 7919 % vocab_size)[None]
    with torch.no_grad():
        inputs = ModelInputs(token_ids, torch.arange(7, device=device), token_ids[0, 1:])
        fused = backend.logprobs(inputs, 1.0).logps
        logits = backend.model(input_ids=token_ids, use_cache=False).logits[0, :-1].float()
        plain = logits.log_softmax(-1).gather(-1, token_ids[0, 1:, None]).squeeze(-1)
    difference = (fused - plain).abs().max().item()
    if not difference <= _PROBE_TOLERANCE:
        raise UsageError(
            f"{type(backend.model).__name__} changes its logits after the output head in a way we do not know: "
            f"log-probs differ by {difference:.3g} nats; this architecture is not supported yet"
        )


def critic_states(critic: CriticBackend, inputs: ModelInputs) -> Tensor:
    """`[K, hidden]` float32, what the critic's head is given, over its mean size: the values themselves may all be 0.
    Collective."""
    seen: list[Tensor] = []
    head: nn.Module = critic.module.value_head  # type: ignore[assignment]
    hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0].float()))
    try:
        critic.values(inputs)
    finally:
        hook.remove()
    return seen[0] / seen[0].abs().mean()


def why_not_packed(
    backend: Training,
    form: Form,
    vocab_size: int,
    device: torch.device,
    output: Callable[[ModelInputs], Tensor] | None = None,
) -> str:
    """Why rows cannot be packed so for this architecture, or "" where they can. Collective.

    Layers other than full attention cannot; then the `output` (of a policy, log-probs) for four completions in one row
    is compared with that for a row each.
    """
    output = output or (lambda inputs: cast(Backend, backend).logprobs(inputs, 1.0).logps)
    name, own_attention = type(backend.model).__name__, takes_packed_rows(backend.model)
    config = backend.model.config.get_text_config()
    if form.shared and not own_attention:
        return f"{name} attends by {config._attn_implementation}, and only SDPA can share a prompt"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"{name} has {', '.join(sorted(kinds))} layers, and only full attention can be packed"
    if getattr(config, "attention_dropout", 0.0):
        return f"{name} has attention dropout"
    tokens = (torch.arange(1, 33) * 7919 % vocab_size).tolist()
    # Two prompts with two completions each.
    prompts = [tokens[:4], tokens[:4], tokens[4:10], tokens[4:10]]
    completions = [tokens[10:15], tokens[15:22], tokens[22:25], tokens[25:31]]
    batch = round_batch(prompts, completions, [[0.0] * len(c) for c in completions], [0.0] * 4, [False] * 4)
    units = [(0, 1), (2, 3)] if form.shared else [(0,), (1,), (2,), (3,)]
    with torch.no_grad():
        padded = collate(batch, [(0,), (1,), (2,), (3,)], Form(), device)
        apart = output(padded.inputs)
        together = output(collate(batch, units, form, device, own_attention).inputs)
    difference = (apart - together).abs().mean().item()
    if not difference <= (_PACKED_TOLERANCE if backend.model.dtype == torch.float32 else _PACKED_TOLERANCE_16_BIT):
        return (
            f"{name} lets a packed completion see its neighbours (what it computes differs by {difference:.3g} on "
            "average)"
        )
    return ""


def choose_cut(
    args: RlhfArguments, backend: Backend, vocab_size: int, ranks: Ranks, critic: CriticBackend | None = None
) -> Cut:
    """How this run cuts its rounds into micro-batches, by the flags and what the model can do. Collective.

    Raises:
        UsageError: if `--share_prompt true` or `--packing true` asks for what it cannot.
    """

    def why_not(form: Form) -> str:
        found = why_not_packed(backend, form, vocab_size, ranks.device)
        if found or critic is None:
            return found
        if takes_packed_rows(critic.model) != takes_packed_rows(backend.model):
            return f"policy and critic ({type(critic.model).__name__}) attend in different ways"
        return why_not_packed(critic, form, vocab_size, ranks.device, lambda inputs: critic_states(critic, inputs))

    form = Form(packed=args.packing)
    if form.packed and (why := why_not(form)):
        raise UsageError(f"--packing true: {why}")
    share_from = {"auto": LEAST_SAVING, "true": 0.0, "false": None}[args.share_prompt]
    if share_from is not None and (why := why_not(SHARED)):
        if args.share_prompt == "true":
            raise UsageError(f"--share_prompt true: {why}")
        if ranks.is_main:
            logger.info("--share_prompt auto: prompts are computed for each completion, since %s", why)
        share_from = None
    return Cut(
        form,
        args.per_device_train_batch_size,
        args.num_generations,
        args.max_tokens_per_micro_batch,
        share_from,
        takes_packed_rows(backend.model),
    )
