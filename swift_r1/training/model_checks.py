"""Model checks before training: whether log-probs are right in the forms that we compute them in."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from swift_r1.algorithms.methods import ESTIMATORS
from swift_r1.errors import UsageError
from swift_r1.flags import RunFlags
from swift_r1.models.attention import takes_packed_rows
from swift_r1.models.logprobs import rounded_products
from swift_r1.models.multimodal import probe_tokens
from swift_r1.models.policy import Critic, ModelInputs
from swift_r1.models.routing import routing_of
from swift_r1.models.vision import Vision, packs_images
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.serving.engines.checks import last_bit, narrowed, own_logprobs, tolerance
from swift_r1.serving.engines.decoding import other_layers
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.training.backends.base import Backend
from swift_r1.training.batching import Batching, collate, round_batch
from swift_r1.training.micro_batches import LEAST_SAVING, SHARED, Form, Unit
from swift_r1.wire.protocol import RolloutRequest, SamplingParams

logger = logging.getLogger(__name__)

_HEAD_TOLERANCE = 0.05
"""Largest difference (nats) between fused and plain log-probs of the same hidden states that bf16 rounding explains."""
_ROUNDINGS = 2
"""Times what one rounding changes, in 16 bits: more of the whole than `tolerance` is explained by that. SmolLM2 changes
by 0.29 nats, and after 20 steps of `swift sft` by 0.21, where two kinds of attention differ by 0.12; wrong positions
change it by 3."""


def check_logprobs(backend: Backend) -> None:
    """Raises UsageError for an architecture whose log-probs are not those of its own forward pass.

    The output head is compared under the attention that is used, which leaves little to rounding, and the whole under
    transformers' eager attention, which leaves out nothing. Collective.
    """
    token_ids = torch.tensor(probe_tokens(32, backend.model.config), device=backend.device).view(
        2, 16
    )
    # In all places, the last ones for nothing: a GPU may round a product of fewer rows otherwise.
    inputs = ModelInputs(
        token_ids, torch.arange(32, device=backend.device), token_ids.roll(-1, 1).flatten()
    )
    model = backend.model
    with narrowed(model), rounded_products(), torch.no_grad():
        ours = backend.logprobs(inputs, 1.0).logps.view(2, 16)[:, :-1]
        with backend.callable_model():
            head = (ours - own_logprobs(model, token_ids)).abs().max().item()
            own = own_logprobs(model, token_ids, "eager")
            whole = (ours - own).abs().mean().item()
            explained = tolerance(model)
            if model.dtype != torch.float32:
                explained = max(explained, _ROUNDINGS * last_bit(model, token_ids, own))
    if not (head <= _HEAD_TOLERANCE and whole <= explained):
        raise UsageError(
            f"{type(model).__name__} computes its logits in a way we do not know: its own log-probs differ from ours "
            f"by {max(head, whole):.3g} nats; this architecture is not supported yet"
        )


def check_routing(backend: Backend, mode: str) -> None:
    """Raises UsageError for a model whose experts cannot be replayed: dense ones, and those whose routers choose in
    another way, or whose log-probs change by it. Collective."""
    token_ids = torch.tensor([probe_tokens(32, backend.model.config)], device=backend.device)
    inputs = ModelInputs(
        token_ids, torch.arange(32, device=backend.device), token_ids.roll(-1, 1).flatten()
    )
    try:
        routing = routing_of(backend.model)
        with torch.no_grad():
            with routing.noting():
                own = backend.logprobs(inputs, 1.0).logps
                routes = routing.noted()[None]
            again = backend.logprobs(inputs._replace(routes=routes), 1.0).logps
    except UsageError as error:
        raise UsageError(f"--router_replay_mode {mode}: {error}") from error
    routing.take_counts()
    difference = (own - again).abs().mean().item()
    if not difference <= tolerance(backend.model):
        raise UsageError(
            f"--router_replay_mode {mode}: with its own experts replayed {type(backend.model).__name__} has other "
            f"log-probs, by {difference:.3g} nats"
        )


def check_invariance(engine: TransformersEngine, backend: Backend) -> None:
    """Raises UsageError where the engine's log-probs of a few completions are not the trainer's to the bit, each in a
    row of its own, or packed behind their prompts. Collective."""
    tokens = probe_tokens(40, backend.model.config)
    requests = [
        RolloutRequest(
            request_id=str(length),
            prompt_token_ids=tuple(tokens[:length]),
            n=2,
            seeds=(length, 7 + length),
            sampling=SamplingParams(max_tokens=12, ignore_eos=True),
        )
        for length in (3, 40)
    ]
    with narrowed(backend.model, engine.model), torch.no_grad():
        outputs = engine.generate(requests, 0)
        rows = [
            TokenSequence.of_answer(tokens[: len(request.prompt_token_ids)], one.token_ids)
            for request, output in zip(requests, outputs, strict=True)
            for one in output.completions
        ]
        batch = round_batch(rows, rewards=[0.0] * 4)
        own = takes_packed_rows(backend.model)
        engines = [one for output in outputs for one in output.completions]
        expected = torch.tensor([logp for one in engines for logp in one.logprobs])
        for form, units in ((Form(), [(0,), (1,), (2,), (3,)]), (SHARED, [(0, 1), (2, 3)])):
            inputs = collate(batch, units, form, backend.device, own).inputs
            off = (backend.logprobs(inputs, 1.0).logps - expected).abs()
            if off.any():
                raise UsageError(
                    f"--batch_invariant true: {type(backend.model).__name__} is not computed so: the engine has other "
                    f"log-probs than the trainer, {int(off.count_nonzero())} of {len(off)}, by up to {off.max():.2g}"
                )


def head_states(critic: Backend, inputs: ModelInputs) -> Tensor:
    """`[K, hidden]` float32, the input of the critic's head over its mean size: the values themselves may all be 0.
    Collective."""
    assert isinstance(critic.module, Critic)
    seen: list[Tensor] = []
    hook = critic.module.value_head.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].float())
    )
    try:
        critic.values(inputs)
    finally:
        hook.remove()
    states = seen[0]
    if inputs.sequence is not None:
        states = inputs.together(states)
    return states / states.abs().mean()


def why_not_packed(backend: Backend, form: Form) -> str:
    """Says why rows cannot be packed so for this architecture, or "" where they can. Collective.

    Layers other than attention cannot; else log-probs (of a critic the head's inputs) of four completions in one row,
    which a sequence group shares, are compared with those of a row each.
    """

    def output(units: Sequence[Unit], form: Form) -> Tensor:
        group = sequence if form.packed else None
        inputs = collate(batch, units, form, backend.device, own_attention, sequence=group).inputs
        critic = isinstance(backend.module, Critic)
        return head_states(backend, inputs) if critic else backend.logprobs(inputs, 1.0).logps

    name = type(backend.model).__name__
    own_attention = takes_packed_rows(backend.model)
    config = backend.model.config.get_text_config()
    sequence = backend.ranks.sequence
    kinds = other_layers(config)
    if kinds:
        return f"{name} has {', '.join(kinds)} layers, and only plain attention can be packed"
    if not own_attention and (form.shared or sequence is not None):
        what = "share a prompt" if form.shared else "be spread over ranks"
        return f"{name} attends by {config._attn_implementation}, and only SDPA can {what}"
    if sequence is not None and (heads := config.num_attention_heads) % sequence.size:
        return f"its {heads} attention heads do not divide among {sequence.size} ranks"
    tokens = probe_tokens(32, backend.model.config)
    # Two prompts with two completions each.
    prompts = [tokens[:4], tokens[:4], tokens[4:10], tokens[4:10]]
    completions = [tokens[10:15], tokens[15:22], tokens[22:25], tokens[25:31]]
    rows = [
        TokenSequence.of_answer(prompt, completion)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    batch = round_batch(rows, rewards=[0.0] * 4)
    alone = [(0,), (1,), (2,), (3,)]
    with narrowed(backend.model), torch.no_grad():
        apart = output(alone, Form())
        together = output([(0, 1), (2, 3)] if form.shared else alone, form)
    difference = (apart - together).abs().mean().item()
    if not difference <= tolerance(backend.model):
        return (
            f"{name} lets a packed completion see its neighbours (what it computes differs by {difference:.3g} on "
            "average)"
        )
    return ""


def choose_batching(
    args: RunFlags,
    backend: Backend,
    critic: Backend | None = None,
    vision: Vision | None = None,
) -> Batching:
    """Decides how this run batches its rounds, by the flags and what the model can do. Collective. Raises UsageError:
    if the model cannot do what `--share_prompt true`, `--packing true` or `--sequence_parallel_size` asks for."""

    def why_not(form: Form) -> str:
        if vision is not None and not packs_images(backend.model):
            return (
                f"the tokens of an image see each other both ways in {type(backend.model).__name__}"
            )
        found = why_not_packed(backend, form)
        if found or critic is None:
            return found
        if takes_packed_rows(critic.model) != takes_packed_rows(backend.model):
            return f"policy and critic ({type(critic.model).__name__}) attend in different ways"
        return why_not_packed(critic, form)

    spread = args.sequence_parallel_size
    form = Form(packed=args.packing or spread > 1)
    if form.packed and (why := why_not(form)):
        raise UsageError(
            f"--sequence_parallel_size {spread}: {why}" if spread > 1 else f"--packing true: {why}"
        )
    share_from = {"auto": LEAST_SAVING, "true": 0.0, "false": None}[args.share_prompt]
    if share_from is not None and (why := why_not(SHARED)):
        if args.share_prompt == "true":
            raise UsageError(f"--share_prompt true: {why}")
        if backend.ranks.is_rank0:
            logger.info(
                "--share_prompt auto: prompts are computed for each completion, since %s", why
            )
        share_from = None
    return Batching(
        form,
        args.per_device_train_batch_size,
        args.num_generations,
        args.max_tokens_per_micro_batch,
        share_from,
        takes_packed_rows(backend.model),
        args.overlong_filter,
        # With a critic, a KL, a teacher, rewards of turns or the baseline of the whole batch they teach all the same.
        silent_apart=critic is None
        and not args.beta
        and args.distillation is None
        and not args.credits_turns
        and ESTIMATORS[args.advantage_estimator].baseline == "group",
        vision=vision,
    )
