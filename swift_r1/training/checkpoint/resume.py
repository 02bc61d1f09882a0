"""Where a run is, out of the loop into a checkpoint and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from swift_r1.errors import UsageError
from swift_r1.sampling.collecting import Collector
from swift_r1.sampling.prefetch import AheadCollector
from swift_r1.training.checkpoint.open_round import OpenRound, round_tensors
from swift_r1.training.checkpoint.rng import restore_rng
from swift_r1.training.checkpoint.run_state import RunState, log_sizes
from swift_r1.training.checkpoint.saving import Saved, critic_tensors, optimizer_tensors, reference_tensors, rng_of
from swift_r1.training.context import Parts
from swift_r1.training.summary import Outcome


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


def captured(progress: Progress, parts: Parts, collector: Collector | AheadCollector) -> Saved:
    """All that a checkpoint holds of the run beside the weights. Collective."""
    main, round_ = parts.main, progress.open_round
    run = None
    if main is not None:
        facts = round_ and {"done": round_.done, "metrics": round_.metrics, "seconds": round_.seconds}
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
            round=facts,
            logs=log_sizes(parts.saver.run_dir),
            fingerprint=parts.fingerprint,
        )
    tensors = round_tensors(round_, parts.ranks) if round_ and parts.saver.with_state else {}
    return Saved(run, tensors)


def restored(checkpoint: Path, parts: Parts) -> Progress:
    """Brings all parts to where the checkpoint left them; prompts are at their place already. An open round is not in
    the result: `Trainer.reopen` computes it.

    Raises:
        UsageError: the state is not of this model.
    """
    state = RunState.read(checkpoint)
    try:
        parts.backend.load_training_state(optimizer_tensors(checkpoint))
        if parts.critic is not None:
            parts.critic.backend.load_training_state(critic_tensors(checkpoint))
        if parts.args.sync_ref_model and parts.reference is not None:
            parts.reference.load_weights(reference_tensors(checkpoint))
    except (KeyError, RuntimeError) as error:
        raise UsageError(f"{checkpoint} cannot be resumed from: its state is of another model: {error}") from error
    parts.learning_rate.go_to(state.step)
    if parts.critic is not None:
        parts.critic.learning_rate.go_to(state.step)
    if parts.main is not None:
        parts.main.monitor.restore(state.rewards)
        parts.recorder.restore_window(state.window)
    # Between rounds, the weights are published again as what they were.
    again = state.round is None
    parts.rollouts.resume(state.weight_version - again)
    if rng := rng_of(checkpoint, parts.ranks.rank):
        restore_rng(rng)
    published = -1 if again else state.published
    return Progress(Outcome(**state.outcome), state.rounds, published, state.skipped_in_a_row)
