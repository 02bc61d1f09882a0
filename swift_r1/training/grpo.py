"""The policy's part of a round: its batch, log-probs before the first update, the KL in the reward, and the updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from swift_r1.algorithms.advantages import Advantages
from swift_r1.algorithms.aggregation import (
    divide,
    drop_truncated,
    loss_normalizer,
    mean_metrics,
    sum_metrics,
    token_means,
)
from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.kl import rewards_less_kl
from swift_r1.algorithms.losses import (
    ROLLOUT_LOG_RATIO_BOUND,
    LossOutput,
    limited_log_ratio,
    marked_tokens,
    policy_loss,
    rollout_weights,
    top_entropy_threshold,
)
from swift_r1.algorithms.method import Estimator
from swift_r1.algorithms.methods import ESTIMATORS, LOSSES
from swift_r1.algorithms.methods.teacher import reverse_kl
from swift_r1.algorithms.off_policy import WholeMeans, completion_weights, of_owners, weight_metrics
from swift_r1.flags import RunFlags
from swift_r1.models.policy import MicroBatch
from swift_r1.models.routing import routing_of
from swift_r1.models.weights import part_of, whole_shape
from swift_r1.rollout.scoring import ScoredRound
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend, ReferencePolicy
from swift_r1.training.backends.optimizer_state import trained_parameters
from swift_r1.training.batching import (
    Batching,
    RoundBatch,
    everywhere,
    places_of,
    round_batch,
    split_step,
)
from swift_r1.training.chord import ExpertStep
from swift_r1.training.token_values import StepTokens

_SAMPLED = 256  # numbers of a matrix, at least


def batch_of_round(
    scored: ScoredRound | None,
    ranks: Ranks,
    prompts: Sequence[Sequence[int]] | None = None,
    credit: Sequence[Sequence[float]] | None = None,
) -> RoundBatch:
    """Returns the round's completions, which rank 0 has, as tensors on every rank; after `prompts`, where these are not
    their own; with the `credit` of the turns of each completion (`turn_credit`), if they have some. Collective."""
    batch = None
    if scored is not None:
        trained = scored.trained
        rows = [row for trajectory in trained for row in trajectory.rows]
        if prompts is not None:
            rows = [
                replace(row, prompt_token_ids=prompt, routes=None)
                for row, prompt in zip(rows, prompts, strict=True)
            ]
        batch = round_batch(
            rows,
            rewards=[trajectory.outcome for trajectory in trained],
            truncated=[trajectory.finish_reason == "length" for trajectory in trained],
            owners=[number for number, trajectory in enumerate(trained) for _ in trajectory.rows],
            turn_advantages=() if credit is None else _of_turns(trained, credit),
        )
    return everywhere(batch, ranks)


def _of_turns(
    trained: Sequence[Trajectory], credit: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Returns what the `credit` of turns adds to the advantage of each row's tokens; 0 for those of no turn."""
    of_rows = []
    for trajectory, of_turns in zip(trained, credit, strict=True):
        for row in trajectory.rows:
            turns = row.turns or (-1,) * len(row.token_ids)
            of_rows.append([of_turns[turn] if of_turns and turn >= 0 else 0.0 for turn in turns])
    return of_rows


def known_advantages(batch: RoundBatch, advantages: Advantages, overlong_filter: bool) -> Tensor:
    """float32 `[N]`: NaN for a completion on which nothing is trained: it has no valid reward, nor anything else that
    gives it an advantage; the policy wrote none of its tokens; or it was cut off, and those are left out."""
    mask = batch.token_mask()
    if overlong_filter:
        mask = drop_truncated(mask, batch.truncated)
    found = advantages.of_completions
    nothing = batch.of_completions(mask.sum(1)) == 0
    known: Tensor = found.masked_fill(nothing | ~batch.rewards.isfinite() & (found == 0), torch.nan)
    return known


def advantages_of_turns(
    trained: Sequence[Trajectory], advantages: Tensor
) -> list[list[float | None]]:
    """Returns the advantage of each turn's tokens, of each completion; `advantages` are `[R, longest]`, of the rows of
    all completions. None for a turn that has no token there."""
    found: list[list[float | None]] = []
    rows = iter(advantages.tolist())
    for trajectory in trained:
        of_turns: list[float | None] = [None] * len(trajectory.turns)
        for row in trajectory.rows:
            of_tokens = zip(row.turns, row.loss_mask, next(rows), strict=False)
            for turn, trained_there, value in of_tokens:
                if trained_there:
                    of_turns[turn] = value
        found.append(of_turns)
    return found


def split_round(
    batch: RoundBatch, steps: int, batching: Batching, ranks: Ranks
) -> list[list[MicroBatch]]:
    """This rank's micro-batches of each of the round's optimizer steps. Consecutive completions, so whole groups where
    sizes allow, make a step."""
    size = len(batch) // steps
    return [
        split_step(batch, range(start, start + size), batching, ranks)
        for start in range(0, len(batch), size)
    ]


def needs_old_policy(args: RunFlags, updates: int) -> bool:
    """Whether a round of `updates` optimizer steps needs a forward pass before its first one. With one update the
    training forward gives the old log-probs; but a KL in the reward and a teacher's word come before the advantages,
    the entropy threshold and marked tokens before the first backward pass, and the log has the entropies before it."""
    return (
        updates > 1
        or args.kl_in_reward
        or args.kl_coef > 0
        or args.top_entropy_quantile < 1
        or LOSSES[args.loss_type].marks is not None
        or ESTIMATORS[args.advantage_estimator].of_tokens is not None
        or args.log_entropy
        or args.router_replay_mode == "R2"
        or (args.distillation is not None and args.distillation.needs_old_logps)
    )


@torch.no_grad()
def before_training(
    steps: Sequence[Sequence[MicroBatch]],
    backend: Backend,
    reference: ReferencePolicy | None,
    temperature: float,
    *,
    old_policy: bool,
    squares: bool = False,
    notes_routes: bool = False,
    critic: Backend | None = None,
) -> list[list[MicroBatch]]:
    """Adds what must be computed with the weights as they are before the round's first update: with `old_policy` the
    policy's log-probs and entropies (and the sums of its squared probabilities, and the experts that its routers choose,
    where asked for), the reference's log-probs, the critic's values. Reference and critic are other models, whose
    routers choose by themselves. Collective."""

    def filled(micro: MicroBatch) -> MicroBatch:
        old = entropies = sums = ref = values = None
        if old_policy:
            routing = routing_of(backend.model) if notes_routes else None
            with nullcontext() if routing is None else routing.noting():
                now = backend.logprobs(micro.inputs._replace(squares=squares), temperature)
                if routing is not None:
                    routes = routing.noted().view(*micro.inputs.token_ids.shape, *routing.shape[:2])
                    micro = replace(micro, inputs=micro.inputs._replace(routes=routes))
            old = micro.unflatten(now.logps)
            entropies = micro.unflatten(now.entropies)
            sums = None if now.squares is None else micro.unflatten(now.squares)
        if reference is not None:
            inputs = micro.inputs._replace(routes=None)
            ref = micro.unflatten(reference.logprobs(inputs, temperature).logps)
        if critic is not None:
            values = micro.unflatten(critic.values(micro.inputs))
        return replace(
            micro,
            old_logps=old,
            old_entropies=entropies,
            old_squares=sums,
            ref_logps=ref,
            old_values=values,
        )

    return [[filled(micro) for micro in micro_batches] for micro_batches in steps]


def with_noted_routes(
    batch: RoundBatch, steps: Sequence[Sequence[MicroBatch]], ranks: Ranks
) -> RoundBatch:
    """Returns the round with the experts that its micro-batches have, those of all ranks. Collective."""
    whole: Tensor | None = None
    for micro in chain.from_iterable(steps):
        routes = micro.inputs.routes
        assert routes is not None
        if whole is None:
            whole = routes.new_zeros(len(batch.token_ids), *routes.shape[2:], device="cpu")
        places = places_of(batch.starts[micro.samples], batch.lengths[micro.samples])
        whole[places] = routes.flatten(0, 1).cpu()[micro.token_places]
    assert whole is not None
    mine = batch.with_routes(whole)
    return replace(mine, routes=ranks.sum_data(mine.routes))  # each row is of one rank


def end_replay(backend: Backend, ranks: Ranks) -> dict[str, float]:
    """Has the routers choose by themselves after an optimizer step. Returns `router_replay/differing`: the share of the
    replayed choices, since the last call, that were of other experts than the router's own at that moment.
    Collective."""
    routing = routing_of(backend.model)
    routing.end_replay()
    replayed, other = ranks.sum_data(routing.take_counts()).tolist()
    return {"router_replay/differing": other / replayed} if replayed else {}


def rewards_after_kl(
    batch: RoundBatch, steps: Sequence[Sequence[MicroBatch]], beta: float, ranks: Ranks
) -> Tensor:
    """`--kl_in_reward`: the round's rewards `[N]` less `beta` times the KL of each completion, on every rank.

    Each rank computes the KL of its own completions. The KL is over all of a completion's tokens, also of one that
    `--overlong_filter` leaves out of the loss: its reward counts in the group's baseline. Collective.
    """
    penalties = torch.zeros(len(batch.owners), dtype=torch.float64)
    for micro in chain.from_iterable(steps):
        assert micro.old_logps is not None and micro.ref_logps is not None
        nothing = torch.zeros(len(micro.samples), dtype=torch.float64, device=micro.mask.device)
        penalty = rewards_less_kl(nothing, micro.old_logps, micro.ref_logps, micro.mask, beta)
        penalties[micro.samples] = penalty.cpu()
    return (batch.rewards + batch.of_completions(ranks.sum_data(penalties))).to(batch.rewards.dtype)


def completion_entropies(
    steps: Sequence[Sequence[MicroBatch]], batch: RoundBatch, ranks: Ranks
) -> Tensor:
    """Mean entropy (nats) of each of the round's completions before its first update, float64 `[N]`, NaN without
    trained tokens, on every rank. Collective."""
    found = torch.zeros(2, len(batch.owners), dtype=torch.float64)  # sums and lengths
    for micro in chain.from_iterable(steps):
        assert micro.old_entropies is not None
        found[0, micro.samples] = (
            micro.old_entropies.double().masked_fill(~micro.mask, 0.0).sum(1).cpu()
        )
        found[1, micro.samples] = micro.mask.double().sum(1).cpu()
    sums, lengths = map(batch.of_completions, ranks.sum_data(found))
    return sums / lengths


def advantage_size(advantages: Tensor) -> dict[str, float]:
    """Returns `advantages/mean_size`: the mean of the completions' advantages `[N]` without their signs, over those
    that have one."""
    known = advantages[advantages.isfinite()].abs()
    return {"advantages/mean_size": known.mean().item()} if len(known) else {}


def of_round(
    name: str, batch: RoundBatch, steps: Sequence[Sequence[MicroBatch]], ranks: Ranks
) -> Tensor:
    """The micro-batches' tensors `[B, T]` of this name, of all ranks, as one float32 `[R, longest]`: what is computed
    from it does not depend on how the round was split. Collective."""
    together = torch.zeros(len(batch.owners), int(batch.completion_lengths.max()))
    for micro in chain.from_iterable(steps):
        part: Tensor = getattr(micro, name)
        together[micro.samples, : part.shape[1]] = part.float().cpu()
    return ranks.sum_data(together)


def advantages_of_tokens(
    rewards: Tensor,
    batch: RoundBatch,
    steps: Sequence[Sequence[MicroBatch]],
    estimator: Estimator,
    config: LossConfig,
    ranks: Ranks,
) -> Tensor:
    """Returns the advantages of a round's tokens by an estimator that has one for each, float32 `[R, longest]`, on every
    rank; `rewards` are `[R]`: a completion is one row. Collective."""
    assert estimator.of_tokens is not None
    old = of_round("old_logps", batch, steps, ranks)
    squares = of_round("old_squares", batch, steps, ranks)
    mask = batch.token_mask()
    weights = None
    if config.rollout_importance_sampling_mode is not None:
        engine = batch.padded(batch.rollout_logps).masked_fill(~mask, 0.0)
        weights, _ = rollout_weights(
            old.masked_fill(~mask, 0.0),
            engine,
            mask.float(),
            config.rollout_importance_sampling_mode,
            config.rollout_importance_sampling_threshold,
        )
    return estimator.of_tokens(rewards, old, squares, mask, config.num_generations, weights)


def entropy_threshold(batches: Sequence[MicroBatch], quantile: float, ranks: Ranks) -> Tensor:
    """The entropy (float32 scalar) from which on a token of this optimizer step is trained, from those of all ranks
    under the policy before the round's first update. Collective."""
    entropies = [
        micro.old_entropies[micro.trained] for micro in batches if micro.old_entropies is not None
    ]
    everyones = ranks.gather_data(torch.cat(entropies).cpu())
    mine = None
    if everyones is not None:
        together = torch.cat(everyones)
        mine = [top_entropy_threshold(together, torch.ones_like(together), quantile)[None]]
    return ranks.broadcast(mine)[0][0]


def marks_of_step(
    batches: Sequence[MicroBatch], advantages: Tensor, config: LossConfig, seed: int, ranks: Ranks
) -> Tensor:
    """`marked_tokens` of the rows of an optimizer step, `[R, longest]`, the same on every rank. Collective."""
    longest = int(ranks.max(float(max(micro.mask.shape[1] for micro in batches))))
    # log-probs, and 1 where trained
    found = torch.zeros(2, len(advantages), longest)
    for micro in batches:
        assert micro.old_logps is not None
        trained = micro.trained.float()
        own = torch.stack([micro.old_logps.masked_fill(~micro.trained, 0.0), trained])
        found[:, micro.samples, : trained.shape[1]] = own.cpu()
    logps, there = ranks.sum_data(found)
    of_tokens = (
        advantages[:, :longest]
        if advantages.dim() == 2
        else advantages[:, None].expand(-1, longest)
    )
    return marked_tokens(logps, of_tokens, there != 0, config, seed)


@torch.no_grad()
def group_targets(
    batches: Sequence[MicroBatch],
    labels: Tensor,
    backend: Backend,
    config: LossConfig,
    temperature: float,
    ranks: Ranks,
) -> tuple[Tensor, Tensor]:
    """Returns the advantages of an optimizer step under a loss that compares whole groups, float32 `[N]`; and what the
    sum of -s * A lacks to the sum of the groups' losses, float64 scalar. The scores s, the completions' mean
    log-ratios, take one more forward pass, except in a round of a single step, where they are 0. Collective.

    Args:
        labels: float32 `[N]`, of the whole round; completions without a trained token count as if theirs were 0.
    """
    assert config.loss.targets is not None
    # scores, and which completions are in this step
    found = torch.zeros(2, len(labels), dtype=torch.float64)
    for micro in batches:
        found[1, micro.samples] = micro.trained.any(1).double().cpu()
        if micro.old_logps is not None:
            moved = (
                micro.unflatten(backend.logprobs(micro.inputs, temperature).logps) - micro.old_logps
            )
            found[0, micro.samples] = (
                token_means(moved, micro.trained.to(moved.dtype)).double().cpu()
            )
    scores, there = ranks.sum_data(found)
    values, total = config.loss.targets(scores, labels * there, config)
    return values.to(labels.dtype), total + (values * scores).sum()


@torch.no_grad()
def means_of_completions(
    batches: Sequence[MicroBatch],
    advantages: Tensor,
    owners: Tensor,
    backend: Backend,
    config: LossConfig,
    temperature: float,
    ranks: Ranks,
) -> Tensor:
    """`WholeMeans` of the rows of an optimizer step, float64 `[6, R]`: the rows of a completion may be in several
    micro-batches, and on several ranks. Takes one more forward pass. Collective."""
    sums = torch.zeros(7, len(owners), dtype=torch.float64)
    for micro in batches:
        now = micro.unflatten(backend.logprobs(micro.inputs, temperature).logps)
        old = now if micro.old_logps is None else micro.old_logps
        gap = (old - micro.rollout_logps).clamp(-ROLLOUT_LOG_RATIO_BOUND, ROLLOUT_LOG_RATIO_BOUND)
        own = of_micro_batch(advantages, micro)
        own = own if own.dim() == 2 else own[:, None].expand_as(now)
        moved = limited_log_ratio(now - old, own, config)
        engine = micro.rollout_logps
        values = torch.stack([moved, gap, engine - now, own, old, engine, torch.ones_like(now)])
        sums[:, micro.samples] = (values.double() * micro.trained).sum(2).cpu()
    sums = ranks.sum_data(sums)
    *whole, counts = sums.new_zeros(sums.shape).index_add_(1, owners, sums)[:, owners]
    means: Tensor = torch.stack(whole) / counts.clamp(min=1)
    return means


def train_step(
    batches: Sequence[MicroBatch],
    advantages: Tensor,
    backend: Backend,
    config: LossConfig,
    temperature: float,
    learning_rate: float,
    ranks: Ranks,
    frozen: bool = False,
    tokens: StepTokens | None = None,
    experts: ExpertStep | None = None,
    owners: Tensor | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """The policy's loss and update. Collective.

    Args:
        advantages: float32 `[R]`, of the rows of the whole round; or `[R, longest]`, one per token; for a
            loss that compares groups its labels.
        frozen: no backward pass and no update; gradient norm and rate are 0.
        tokens: takes what this loss sees and does of the completions that are recorded.
        experts: their loss is added, times its mu, and the policy's is times 1 - mu.
        owners: int64 `[R]`, the completion of each row of the round; by default each is one.
        seed: of tokens that the loss draws by chance.

    Returns:
        As `update`, with each rank's `micro_batches` and the `tokens_computed` of all of them (prompts, completions and
        padding that went through the model).
    """
    normalizer = (
        torch.stack([loss_normalizer(micro.trained, config, micro.shares) for micro in batches])
        .sum()
        .cpu()
    )
    computed = torch.tensor(
        sum(micro.inputs.token_ids.numel() for micro in batches), dtype=torch.float64
    )
    # From where on every advantage is 0, on all ranks: these have no gradient, and none is computed.
    signals = [advantages[micro.samples].count_nonzero().double() for micro in batches]
    normalizer, computed, *signals = ranks.sum_data(torch.stack([normalizer, computed, *signals]))
    taught = bool(config.distillations) or any(micro.teacher_ids is not None for micro in batches)
    everywhere = config.kl_in_loss or config.entropy_coef > 0 or config.loss.everywhere or taught
    num_backward = max(
        (place for place, signal in enumerate(signals, start=1) if signal or everywhere), default=1
    )
    filtered = config.top_entropy_quantile < 1
    threshold = entropy_threshold(batches, config.top_entropy_quantile, ranks) if filtered else None
    marked = None
    if config.loss.marks is not None:
        marked = marks_of_step(batches, advantages, config, seed, ranks)
    several = owners is not None and int(owners[-1]) + 1 < len(owners)
    means = None
    if several and (config.by_completion or config.log_rollout_offpolicy_metrics):
        assert owners is not None
        means = means_of_completions(
            batches, advantages, owners, backend, config, temperature, ranks
        )
    weights: list[Tensor] = []  # of each micro-batch, on its device
    lacking = 0.0  # of `loss`, in what it is computed from
    if config.loss.targets is not None:
        advantages, lacks = group_targets(batches, advantages, backend, config, temperature, ranks)
        lacking = divide(lacks, normalizer).item()

    def loss_of(micro: MicroBatch) -> LossOutput:
        inputs = micro.inputs
        teacher_kl = None
        if micro.teacher_ids is not None:
            ids = torch.cat([inputs.targets[:, None], micro.flatten(micro.teacher_ids)], 1)
            inputs = inputs._replace(targets=ids)
        inputs = inputs._replace(entropy_gradient=config.entropy_coef > 0)
        found = backend.logprobs(inputs, temperature)
        if micro.teacher_tops is not None:
            teacher_kl = micro.unflatten(
                reverse_kl(found.logps[:, 1:], micro.flatten(micro.teacher_tops))
            )
        logps = micro.unflatten(found.logps if found.logps.dim() == 1 else found.logps[:, 0])
        entropies = micro.unflatten(found.entropies)
        result = policy_loss(
            logps,
            logps.detach() if micro.old_logps is None else micro.old_logps,
            of_micro_batch(advantages, micro),
            micro.trained,
            config,
            ref_logps=micro.ref_logps,
            rollout_logps=micro.rollout_logps,
            entropies=entropies,
            # The filter and its threshold must see the same numbers, or rounding decides about a token at the edge.
            old_entropies=micro.old_entropies,
            teacher_kl=teacher_kl,
            teacher_logps=micro.teacher_logps,
            shares=micro.shares,
            whole=None if means is None else WholeMeans(*means[:, micro.samples].to(logps)),
            marked=None if marked is None else of_micro_batch(marked, micro),
            normalizer=normalizer,
            entropy_threshold=threshold,
        )
        if tokens is not None:
            tokens.add(micro, logps, entropies.detach(), result)
        if config.log_rollout_offpolicy_metrics:
            weights.append(completion_weights(logps, micro.rollout_logps, micro.trained))
        loss = result.loss if experts is None else (1 - experts.mu) * result.loss
        return replace(result, loss=loss)

    losses = experts.losses(backend) if experts is not None else []
    num_backward = 0 if frozen else num_backward + len(losses)
    losses += [partial(loss_of, micro) for micro in batches]
    metrics = update(losses, backend, learning_rate, ranks, num_backward=num_backward)
    if experts is not None:
        metrics["chord/mu"] = experts.mu
        lacking *= 1 - experts.mu
    metrics["loss"] += lacking
    if threshold is not None and threshold.isfinite():
        metrics["entropy/threshold"] = threshold.item()
    if config.log_rollout_offpolicy_metrics:
        # no token where a completion is of no rank
        everyones = torch.zeros(5, len(advantages), dtype=torch.float64)
        everyones[:, torch.cat([micro.samples for micro in batches])] = torch.cat(weights, 1).cpu()
        everyones = ranks.sum_data(everyones)
        metrics |= weight_metrics(everyones if owners is None else of_owners(everyones, owners))
    return metrics | {"micro_batches": float(len(batches)), "tokens_computed": computed.item()}


def update(
    losses: Sequence[Callable[[], LossOutput]],
    backend: Backend,
    learning_rate: float,
    ranks: Ranks,
    *,
    coefficient: float = 1.0,
    num_backward: int | None = None,
) -> dict[str, float]:
    """Forward, loss and backward (of `coefficient` times the loss) of each micro-batch, then one update. Collective.

    `losses` do a micro-batch's forward pass each.

    Args:
        num_backward: so many, the first ones, have a backward pass; None: all; 0: and there is no update either.

    Returns:
        The whole step's `loss`, `grad_norm` (where one is not finite nothing was updated), `learning_rate`, the loss's
        metrics, and in float16 the `loss_scale` that this step used; the same on every rank.
    """
    metrics = []
    num_backward = len(losses) if num_backward is None else num_backward
    for number, loss in enumerate(losses, start=1):
        with torch.set_grad_enabled(number <= num_backward):
            result = loss()
        if number <= num_backward:
            # A loss that is not finite must give a gradient that is not, whatever the rank: then all skip the update.
            factor = torch.full_like(result.loss, coefficient).masked_fill(
                ~result.loss.isfinite(), math.nan
            )
            backend.backward(factor * result.loss, last=number == num_backward)
        metrics.append(result.metrics | {"loss": result.loss.detach().double()})
    scale = backend.loss_scale
    grad_norm, learning_rate = (
        (backend.step(learning_rate), learning_rate) if num_backward else (0.0, 0.0)
    )
    # Nothing before this waits for the device: it computes while the next micro-batches are sent to it.
    names, sums = zip(*sorted(sum_metrics(metrics).items()), strict=True)
    totals = dict(
        zip(names, ranks.sum_data(torch.stack([value.double() for value in sums])), strict=True)
    )
    found = {"loss": totals["loss"].item(), "grad_norm": grad_norm, "learning_rate": learning_rate}
    found |= mean_metrics(totals)
    return found if scale is None else found | {"loss_scale": scale}


def of_micro_batch(of_round: Tensor, micro: MicroBatch) -> Tensor:
    """The rows of a round's tensor, `[R]` or `[R, longest]`, that belong to a micro-batch: `[B]` or `[B, T]`."""
    rows = of_round[micro.samples]
    return (rows if rows.dim() == 1 else rows[:, : micro.mask.shape[1]]).to(
        micro.mask.device, non_blocking=True
    )


def weight_sample(model: nn.Module) -> Tensor:
    """A copy of some numbers, `[n]`, of this rank's part of each trained matrix that is kept in 16 bits. Vectors are
    left out: updates do not reach the scales of norms, which are near 1, and always those of biases that begin at 0."""
    matrices = (one for _, one in trained_parameters(model) if len(whole_shape(one)) > 1)
    parts = (getattr(one, "ds_tensor", part_of(one)).detach().flatten() for one in matrices)
    found = [
        part[:: max(1, part.numel() // _SAMPLED)] for part in parts if part.dtype.itemsize == 2
    ]
    return torch.cat(found) if found else torch.empty(0)


def changed_share(before: Tensor, after: Tensor, ranks: Ranks) -> dict[str, float]:
    """`weights/changed`: the share of the numbers of a `weight_sample` that are others now, without those that are all
    but 0 (the row of a padding token), which any update changes; nothing where none are kept in 16 bits. Collective."""
    sizes = before.float().abs()
    counted = sizes > 1e-4 * sizes.square().mean().sqrt()
    both = torch.stack([((before != after) & counted).sum(), counted.sum()])
    changed, count = ranks.sum_data(both).tolist()
    return {"weights/changed": changed / count} if count else {}
