"""Where a run is, from the loop into a checkpoint and back: its progress, and the round that is not finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from swift_r1.errors import UsageError
from swift_r1.runtime.ranks import Ranks
from swift_r1.sampling.collecting import Collector
from swift_r1.sampling.prefetch import AheadCollector
from swift_r1.training.algorithm import Targets
from swift_r1.training.batch.batching import RoundBatch
from swift_r1.training.checkpoint.saving import CRITIC_OPTIMIZER, OPTIMIZER, REFERENCE, rng_of, saved_tensors
from swift_r1.training.checkpoint.state import RunState, log_sizes, restore_rng
from swift_r1.training.context import Parts
from swift_r1.training.step import TrainingBatch
from swift_r1.training.summary import Outcome

_BEFORE_TRAINING = ("old_logps", "old_entropies", "ref_logps", "old_values")
"""What was computed with the weights before the round's first step, which are gone after it."""


@dataclass(slots=True)
class OpenRound:
    """A scored round, and how much of it is trained.

    Attributes:
        steps: this rank's micro-batches of each optimizer step of one pass.
        targets: its advantages.
        metrics: what each of the steps logs of the round.
        seconds: each step's share of the time that the round took as a whole.
        done: optimizer steps taken.
    """

    batch: RoundBatch
    steps: Sequence[Sequence[TrainingBatch]]
    targets: Targets
    metrics: dict[str, float]
    seconds: dict[str, float]
    done: int = 0


def round_tensors(round_: OpenRound, ranks: Ranks) -> dict[str, Tensor]:
    """All that a checkpoint holds of the round, on rank 0; empty elsewhere. Collective."""
    saved: dict[str, Tensor] = {}
    for name in _BEFORE_TRAINING:
        known = [getattr(batch, name) for step in round_.steps for batch in step]
        mine = [tensor.detach().flatten().float().cpu() for tensor in known if tensor is not None]
        everyones = ranks.gather(torch.cat([torch.zeros(0), *mine]))
        for rank, tensor in enumerate(everyones or ()):
            if tensor.numel():
                saved[f"{name}:{rank}"] = tensor
    if not ranks.is_main:
        return {}
    return saved | _fields_of(round_.batch)


def batch_of(saved: Mapping[str, Tensor]) -> RoundBatch:
    """The batch in what `round_tensors` gave."""
    return RoundBatch(**{item.name: saved[item.name] for item in fields(RoundBatch)})


def with_saved(
    steps: Sequence[Sequence[TrainingBatch]], saved: Mapping[str, Tensor], rank: int
) -> list[list[TrainingBatch]]:
    """This rank's micro-batches, split again as they were, with what `round_tensors` saved of them."""
    filled = [list(step) for step in steps]
    for name in _BEFORE_TRAINING:
        flat = saved.get(f"{name}:{rank}")
        if flat is None:
            continue
        parts = iter(torch.split(flat, [batch.mask.numel() for step in filled for batch in step]))
        for step in filled:
            for place, batch in enumerate(step):
                value: Any = next(parts).view_as(batch.mask).to(batch.mask.device)
                step[place] = replace(batch, **{name: value})
    return filled


def write_step(round_: OpenRound, steps_per_pass: int, path: Path) -> None:
    """Writes the batch of the round's coming step to a safetensors file: the round's fields, the advantages, and
    `samples`, the completions that the step is on; with a critic the returns too."""
    size = len(round_.batch) // steps_per_pass
    first = round_.done % steps_per_pass * size
    tensors = _fields_of(round_.batch)
    tensors |= {"advantages": round_.targets.advantages, "samples": torch.arange(first, first + size)}
    if round_.targets.returns is not None:
        tensors["returns"] = round_.targets.returns
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)


def _fields_of(batch: RoundBatch) -> dict[str, Tensor]:
    return {item.name: getattr(batch, item.name) for item in fields(RoundBatch)}


@dataclass(slots=True)
class Progress:
    """How far a run is.

    Attributes:
        rounds: rounds begun.
        published: the optimizer step whose weights the engine holds; -1 for none.
        skipped_in_a_row: optimizer steps without an update at the end of those taken.
        open_round: the round in the middle, or None between rounds.
    """

    outcome: Outcome = field(default_factory=Outcome)
    rounds: int = 0
    published: int = -1
    skipped_in_a_row: int = 0
    open_round: OpenRound | None = None


def captured(
    progress: Progress, parts: Parts, collector: Collector | AheadCollector
) -> tuple[RunState | None, dict[str, Tensor]]:
    """All that a checkpoint holds of the run beside the models, on rank 0: its state, and the open round's tensors.
    Collective."""
    main, round_ = parts.main, progress.open_round
    run = None
    if main is not None:
        prompts_taken, prompts_digest = collector.position
        run = RunState(
            step=progress.outcome.steps,
            rounds=progress.rounds,
            prompts_taken=prompts_taken,
            prompts_digest=prompts_digest,
            published=progress.published,
            weight_version=parts.rollouts.weight_version,
            run_id=parts.run_id,
            skipped_in_a_row=progress.skipped_in_a_row,
            outcome=progress.outcome.to_dict(),
            window=parts.recorder.window(),
            rewards=main.monitor.state(),
            round=None
            if round_ is None
            else {"done": round_.done, "metrics": round_.metrics, "seconds": round_.seconds},
            logs=log_sizes(parts.saver.run_dir),
            fingerprint=parts.fingerprint,
        )
    return run, round_tensors(round_, parts.ranks) if round_ and parts.saver.with_state else {}


def restored(checkpoint: Path, parts: Parts) -> Progress:
    """Restores everything to where the checkpoint left it; prompts are at their place already. An open round is not in
    the result: `Trainer.reopen` computes it.

    Raises:
        UsageError: the state is not of this model.
    """
    state = RunState.read(checkpoint)
    try:
        parts.backend.load_training_state(saved_tensors(checkpoint, OPTIMIZER))
        if parts.critic is not None:
            parts.critic.backend.load_training_state(saved_tensors(checkpoint, CRITIC_OPTIMIZER))
        if parts.args.sync_ref_model and parts.reference is not None:
            parts.reference.load_weights(saved_tensors(checkpoint, REFERENCE))
    except (KeyError, RuntimeError) as error:
        raise UsageError(f"{checkpoint} cannot be resumed from: its state is of another model: {error}") from error
    for one in (parts, parts.critic):
        if one is not None:
            one.learning_rate.go_to(state.step)
    if parts.main is not None:
        parts.main.monitor.restore(state.rewards)
        parts.recorder.restore_window(state.window)
    # Between rounds the weights are published again, under their old version.
    again = state.round is None
    parts.rollouts.resume(state.weight_version - again)
    if rng := rng_of(checkpoint, parts.ranks.rank):
        restore_rng(rng)
    published = -1 if again else state.published
    return Progress(Outcome(**state.outcome), state.rounds, published, state.skipped_in_a_row)
