"""What is tried on a model before it is trained: whether log-probs come out right in the forms we compute them in."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from swift_r1.arguments import RlhfArguments
from swift_r1.errors import UsageError
from swift_r1.inference.engines.decoding import other_layers
from swift_r1.inference.engines.transformers import TransformersEngine
from swift_r1.models.attention import takes_packed_rows
from swift_r1.models.policy import ModelInputs
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend, CriticBackend, Training
from swift_r1.training.batch.batching import Cut, collate, round_batch
from swift_r1.training.batch.micro_batches import LEAST_SAVING, SHARED, Form
from swift_r1.wire.protocol import RolloutRequest, SamplingParams

logger = logging.getLogger(__name__)

_HEAD_TOLERANCE = 0.05
"""Largest difference (nats) between fused and plain log-probs of the same hidden states that bf16 rounding explains."""

_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 0.15
"""Largest mean difference (nats) between log-probs computed in two ways that rounding explains. In bf16 two ways of
padding differ by 0.014 (SmolLM2; single tokens by 0.09), packing by 0.036 (0.13); a leak makes it 1."""

_WINDOW = re.compile(r"(^|_)window(_size)?$|^attention_chunk_size$")
_NARROW = 4
"""Tokens of a window while a model is tried: fewer than its probes have, so that what is beyond it matters."""


@contextmanager
def narrowed(*models: nn.Module) -> Iterator[None]:
    """The models' sliding windows, where they have some, are a few tokens wide, so that short probes leave them."""
    holders = [holder for model in models for holder in (model.config.get_text_config(), *model.modules())]
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
def _own_logprobs(model: nn.Module, token_ids: Tensor, attention: str | None = None) -> Tensor:
    """`[B, L - 1]` by the model's own forward pass, without a cache and as it evaluates; `attention` in place of the
    one that it has."""
    config, training = model.config.get_text_config(), model.training
    before = config._attn_implementation
    config._attn_implementation = attention or before
    model.eval()
    try:
        logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1].float()
    finally:
        config._attn_implementation = before
        model.train(training)
    return logits.log_softmax(-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)


def _allowed(model: nn.Module) -> float:
    return _TOLERANCE if model.dtype == torch.float32 else _TOLERANCE_16_BIT


def check_logprobs(backend: Backend, vocab_size: int, device: torch.device) -> None:
    """Refuses an architecture whose log-probs are not those of its own forward pass, rather than train on wrong ones.

    The output head is compared under the attention that is used, which leaves little to rounding, and the whole under
    transformers' plainest attention, which leaves out nothing. Collective.

    Raises:
        UsageError: if they differ by more than rounding.
    """
    token_ids = (torch.arange(1, 33, device=device) * 7919 % vocab_size).view(2, 16)
    positions = torch.arange(32, device=device).view(2, 16)[:, :-1].flatten()
    model = backend.model
    with narrowed(model), torch.no_grad():
        ours = backend.logprobs(ModelInputs(token_ids, positions, token_ids[:, 1:].flatten()), 1.0).logps.view(2, 15)
        head = (ours - _own_logprobs(model, token_ids)).abs().max().item()
        whole = (ours - _own_logprobs(model, token_ids, "eager")).abs().mean().item()
    if not (head <= _HEAD_TOLERANCE and whole <= _allowed(model)):
        raise UsageError(
            f"{type(model).__name__} computes its logits in a way we do not know: its own log-probs differ from ours "
            f"by {max(head, whole):.3g} nats; this architecture is not supported yet"
        )


def check_engine(engine: TransformersEngine, vocab_size: int) -> None:
    """Refuses an architecture that the embedded engine would sample from another distribution than its own.

    A few completions, of prompts of several lengths, are compared with the model's own forward pass. Under ZeRO-3 each
    rank has a model of its own for this.

    Raises:
        UsageError: if they differ by more than rounding.
    """
    model, differences = engine.model, []
    tokens = (torch.arange(1, 22) * 7919 % vocab_size).tolist()
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [
        RolloutRequest(request_id=str(n), prompt_token_ids=tuple(tokens[n:]), n=2, seeds=(n, 7 + n), sampling=sampling)
        for n in (0, 9, 18)
    ]
    with narrowed(model):
        for request, output in zip(requests, engine.generate(requests, 0), strict=True):
            for one in output.completions:
                token_ids = torch.tensor([request.prompt_token_ids + one.token_ids], device=model.device)
                own = _own_logprobs(model, token_ids, "eager")[0, -len(one.token_ids) :].cpu()
                differences.append((own - torch.tensor(one.logprobs)).abs())
    if not (difference := torch.cat(differences).mean().item()) <= _allowed(model):
        raise UsageError(
            f"the embedded engine does not sample from {type(model).__name__} as it is (log-probs differ by "
            f"{difference:.3g} nats): use `swift rollout` with --use_vllm true"
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

    Layers that do not attend cannot; then the `output` (of a policy, log-probs) for four completions in one row
    is compared with that for a row each.
    """
    output = output or (lambda inputs: cast(Backend, backend).logprobs(inputs, 1.0).logps)
    name, own_attention = type(backend.model).__name__, takes_packed_rows(backend.model)
    config = backend.model.config.get_text_config()
    if form.shared and not own_attention:
        return f"{name} attends by {config._attn_implementation}, and only SDPA can share a prompt"
    if kinds := other_layers(config):
        return f"{name} has {', '.join(kinds)} layers, and only attention can be packed"
    tokens = (torch.arange(1, 33) * 7919 % vocab_size).tolist()
    # Two prompts with two completions each.
    prompts = [tokens[:4], tokens[:4], tokens[4:10], tokens[4:10]]
    completions = [tokens[10:15], tokens[15:22], tokens[22:25], tokens[25:31]]
    batch = round_batch(prompts, completions, [[0.0] * len(c) for c in completions], [0.0] * 4, [False] * 4)
    units = [(0, 1), (2, 3)] if form.shared else [(0,), (1,), (2,), (3,)]
    with narrowed(backend.model), torch.no_grad():
        padded = collate(batch, [(0,), (1,), (2,), (3,)], Form(), device)
        apart = output(padded.inputs)
        together = output(collate(batch, units, form, device, own_attention).inputs)
    difference = (apart - together).abs().mean().item()
    if not difference <= _allowed(backend.model):
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
