"""The state of a run: in the loop, into a checkpoint and back; also in the middle of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from swift_r1.algorithms.rewards import mean
from swift_r1.data.choices import Choices
from swift_r1.errors import UsageError
from swift_r1.record.recorder import Recorder
from swift_r1.rewards.monitor import InvalidRewardMonitor
from swift_r1.rollout.base import Rollouts
from swift_r1.rollout.prompts import Positions
from swift_r1.training.checkpoint.saving import (
    CRITIC_OPTIMIZER,
    OPTIMIZER,
    REFERENCE,
    Saver,
    rng_of,
)
from swift_r1.training.checkpoint.state import (
    STATE,
    Fingerprint,
    PromptState,
    RunState,
    log_sizes,
    restore_rng,
    seed_everything,
)
from swift_r1.training.checkpoint.tensors import SavedTensors
from swift_r1.training.movement import Movement
from swift_r1.training.open_round import OpenRound
from swift_r1.training.optimizer import LearningRate
from swift_r1.training.ppo import TrainedCritic
from swift_r1.wire.protocol import completion_seed


@dataclass
class RunSummary:
    """What `summary.json` says. `seconds` are of the whole loop, evaluations included; accuracies are from 0 to 1, of
    several data sets their mean; `best_step` is of the best checkpoint by `--metric_for_best_model`, after which
    `saves_since_best` were not better."""

    steps: int = 0
    seconds: float = 0.0
    first_reward: float | None = None
    last_reward: float | None = None
    eval_before: float | None = None
    eval_after: float | None = None
    best_step: int | None = None
    best_metric: float | None = None
    saves_since_best: int = 0
    exit_code: int = 0
    last_evaluation: dict[str, float] = field(default_factory=dict)

    def saw_reward(self, reward: float) -> None:
        if not math.isnan(reward):
            self.first_reward = reward if self.first_reward is None else self.first_reward
            self.last_reward = reward

    def saw_evaluation(self, metrics: Mapping[str, float]) -> None:
        self.last_evaluation = {
            name: value for name, value in metrics.items() if not math.isnan(value)
        }
        setattr(self, "eval_after" if self.steps else "eval_before", _mean(metrics, "accuracy"))

    def saw_checkpoint(
        self, metrics: Mapping[str, float], name: str, greater_is_better: bool
    ) -> None:
        """Notes whether the evaluated checkpoint of this step is the best so far; of equals the first is."""
        value = _mean(metrics, name)
        best = self.best_metric
        self.saves_since_best += 1
        if value is None or math.isnan(value):
            return
        if best is None or (value > best if greater_is_better else value < best):
            self.best_step = self.steps
            self.best_metric = value
            self.saves_since_best = 0


def _mean(metrics: Mapping[str, float], name: str) -> float | None:
    values = [value for key, value in metrics.items() if key.endswith(f"/{name}")]
    return mean(values) if values else None


@dataclass(slots=True)
class RunProgress:
    """Says how far a run is."""

    summary: RunSummary = field(default_factory=RunSummary)
    rounds: int = 0  # rounds begun
    published: int = -1  # the optimizer step whose weights the engine holds; -1 for none
    skipped_in_a_row: int = 0  # optimizer steps without an update at the end of those taken
    open_round: OpenRound | None = None  # the round in the middle, or None between rounds
    ended_epoch: bool = False  # the last step was the last of a pass over the prompts
    # the weights of this step are to be evaluated, which a run that stops leaves to the next
    evaluates: bool = False
    movement: Movement | None = None  # since the first round; None before it


@dataclass(frozen=True)
class Checkpoints:
    """Saves a run with all that it needs to go on, and restores it. All methods are collective; `monitor` is on rank 0
    alone."""

    saver: Saver
    learning_rate: LearningRate
    critic: TrainedCritic | None
    rollouts: Rollouts
    recorder: Recorder
    monitor: InvalidRewardMonitor | None
    choices: Mapping[str, Choices]  # with `--prompt_sampler`, by task, on rank 0
    run_id: str
    fingerprint: Fingerprint

    def save(self, progress: RunProgress, positions: Positions | None, last: bool) -> None:
        """A checkpoint of the run as it is after this step; `positions` are in the prompts, on rank 0.

        Raises as `Saver.save`.
        """
        run = None
        round_ = progress.open_round
        summary = progress.summary
        if self.monitor is not None:
            assert positions is not None
            run = RunState(
                step=summary.steps,
                rounds=progress.rounds,
                prompts={
                    name: PromptState(one.taken, one.digest, self._choices(name, one.taken))
                    for name, one in positions.items()
                },
                published=progress.published,
                weight_version=self.rollouts.weight_version,
                run_id=self.run_id,
                skipped_in_a_row=progress.skipped_in_a_row,
                outcome=asdict(summary),
                window=self.recorder.window(),
                rewards=self.monitor.state(),
                round=None if round_ is None else round_.facts(),
                logs=log_sizes(self.saver.run_dir),
                fingerprint=self.fingerprint,
                evaluates=progress.evaluates,
                movement={} if progress.movement is None else asdict(progress.movement),
            )
        with self.saver.ranks.busy():
            self.recorder.flush()
        tensors = (
            round_.tensors(self.saver.ranks) if round_ is not None and self.saver.with_state else {}
        )
        if self.saver.save(summary.steps, run, tensors, last, summary.best_step):
            self.recorder.event("saved", f"checkpoint-{summary.steps}")

    def _choices(self, task: str, taken: int) -> str:
        return self.choices[task].state(taken) if task in self.choices else ""

    def restore(self, checkpoint: Path) -> RunProgress:
        """Restores everything to where the checkpoint left it; prompts are at their place already. An open round is not
        in the result: `Trainer.resume` computes it from `saved_round`. Raises UsageError: the state is not of this
        model."""
        state = RunState.read(checkpoint)
        folder = checkpoint / STATE
        try:
            self.saver.backend.load_training_state(SavedTensors(folder, OPTIMIZER))
            if self.critic is not None:
                self.critic.backend.load_training_state(SavedTensors(folder, CRITIC_OPTIMIZER))
            if self.saver.reference is not None:
                self.saver.reference.load_weights(SavedTensors(folder, REFERENCE))
        except (KeyError, RuntimeError) as error:
            raise UsageError(
                f"{checkpoint} cannot be resumed from: its state is of another model: {error}"
            ) from error
        self.learning_rate.go_to(state.step)
        if self.critic is not None:
            self.critic.learning_rate.go_to(state.step)
        if self.monitor is not None:
            self.monitor.restore(state.rewards)
            self.recorder.restore_window(state.window)
        # Between rounds, and to be evaluated, the weights are published again under their old version.
        again = state.round is None or state.evaluates
        self.rollouts.resume(state.weight_version - again)
        rank = self.saver.ranks.rank
        seed = int(state.fingerprint.args["seed"])
        rng = rng_of(checkpoint, rank)
        if rng:
            restore_rng(rng)
        else:
            seed_everything(completion_seed(seed, "rank", rank, state.step))
        published = -1 if again else state.published
        return RunProgress(
            RunSummary(**state.outcome),
            state.rounds,
            published,
            state.skipped_in_a_row,
            evaluates=state.evaluates,
            movement=Movement.restored(state.movement),
        )
