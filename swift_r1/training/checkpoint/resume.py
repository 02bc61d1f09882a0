"""The state of a run: in the loop, into a checkpoint and back; also in the middle of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from swift_r1.algorithms import Advantages
from swift_r1.algorithms.rewards import mean
from swift_r1.data.choices import Choices
from swift_r1.errors import UsageError
from swift_r1.models.policy import MicroBatch
from swift_r1.record.recorder import Recorder
from swift_r1.rewards.monitor import InvalidRewardMonitor
from swift_r1.rollout.base import Rollouts
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.batching import RoundBatch
from swift_r1.training.checkpoint.saving import (
    CRITIC_OPTIMIZER,
    OPTIMIZER,
    REFERENCE,
    Saver,
    rng_of,
    round_tensors_of,
)
from swift_r1.training.checkpoint.state import STATE, Fingerprint, RunState, log_sizes, restore_rng, seed_everything
from swift_r1.training.checkpoint.tensors import SavedTensors
from swift_r1.training.optimizer import LearningRate
from swift_r1.training.ppo import TrainedCritic
from swift_r1.training.token_values import Recorded, StepTokens
from swift_r1.wire.protocol import completion_seed

_WIDE = ("teacher_ids", "teacher_tops")  # `[B, T, M]`, the others `[B, T]`
_BEFORE_TRAINING = ("old_logps", "old_entropies", "ref_logps", "old_values", "teacher_logps", *_WIDE)
"""What was computed with the weights before the round's first step, which are gone after it; and what a teacher said,
whom nobody asks again. In float32, which has every token id below 2**24."""


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
        self.last_evaluation = {name: value for name, value in metrics.items() if not math.isnan(value)}
        setattr(self, "eval_after" if self.steps else "eval_before", _mean(metrics, "accuracy"))

    def saw_checkpoint(self, metrics: Mapping[str, float], name: str, greater_is_better: bool) -> None:
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
class OpenRound:
    """A scored round, and how much of it is trained.

    Example: after the first of two optimizer steps, on 8 completions each, one pass of two over a round of 16:
        batch of 16, steps `[[micro, micro], [micro, micro]]`, advantages of 16 rows, metrics `{"reward": 0.4, ...}`,
        seconds `{"generate": 1.5, ...}`, done 1
    """

    batch: RoundBatch
    steps: Sequence[Sequence[MicroBatch]]  # this rank's micro-batches of each optimizer step of one pass
    advantages: Advantages
    metrics: dict[str, float]  # what each of the steps logs of the round
    seconds: dict[str, float]  # each step's share of the time that the round took as a whole
    done: int = 0  # optimizer steps taken
    ends_epoch: bool = False  # a pass over the prompts is complete with it
    recorded: Sequence[Recorded] = ()  # its completions that the token record has

    @property
    def samples(self) -> range:
        """The rows of the completions that the coming step is on."""
        size = len(self.batch) // len(self.steps)
        first = self.done % len(self.steps) * size
        return self.batch.rows(range(first, first + size))

    def tokens(self) -> StepTokens | None:
        """Returns what the coming step fills; None where none of its completions is recorded."""
        recorded = [one for one in self.recorded if one["sample"] in self.samples]
        return StepTokens(recorded, self.batch, self.steps[0][0].ref_logps is not None) if recorded else None

    def tensors(self, ranks: Ranks) -> dict[str, Tensor]:
        """Returns all that a checkpoint holds of the round, on rank 0; empty elsewhere. What is known of tokens is in
        the order of the completions, whichever rank has them. Collective."""
        micros = [micro for step in self.steps for micro in step]
        samples = ranks.gather_data(torch.cat([micro.samples for micro in micros]))
        saved: dict[str, Tensor] = {}
        for name in _BEFORE_TRAINING:
            known = [(micro, getattr(micro, name)) for micro in micros]
            mine = [micro.flatten(one).detach().flatten().float().cpu() for micro, one in known if one is not None]
            everyones = ranks.gather_data(torch.cat([torch.zeros(0), *mine]))
            if samples is not None and everyones is not None and (values := torch.cat(everyones)).numel():
                places = self.batch.written(torch.cat(samples))
                values = values.view(len(places), -1)
                saved[name] = torch.empty_like(values).index_copy_(0, places, values)
        return saved | self.batch.tensors() if ranks.is_rank0 else {}

    def facts(self) -> dict[str, Any]:
        """The rest of what a checkpoint holds of it, as JSON."""
        return {
            "done": self.done,
            "metrics": self.metrics,
            "seconds": self.seconds,
            "ends_epoch": self.ends_epoch,
            "recorded": list(self.recorded),
        }

    def write_step(self, path: Path) -> None:
        """Writes the batch of the coming step to a safetensors file: the round's fields, the advantages, and `samples`,
        the rows that the step is on; with a critic the returns too."""
        tensors = self.batch.tensors()
        tensors |= {"advantages": self.advantages.values, "samples": torch.tensor(self.samples)}
        if self.advantages.returns is not None:
            tensors["returns"] = self.advantages.returns
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path)


@dataclass(slots=True)
class RunProgress:
    """Says how far a run is."""

    summary: RunSummary = field(default_factory=RunSummary)
    rounds: int = 0  # rounds begun
    published: int = -1  # the optimizer step whose weights the engine holds; -1 for none
    skipped_in_a_row: int = 0  # optimizer steps without an update at the end of those taken
    open_round: OpenRound | None = None  # the round in the middle, or None between rounds
    ended_epoch: bool = False  # the last step was the last of a pass over the prompts
    evaluates: bool = False  # the weights of this step are to be evaluated, which a run that stops leaves to the next


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
    choices: Choices | None  # with `--prompt_sampler`, on rank 0
    run_id: str
    fingerprint: Fingerprint

    def save(self, progress: RunProgress, position: tuple[int, str] | None, last: bool) -> None:
        """A checkpoint of the run as it is after this step; `position` is of the prompts, on rank 0.

        Raises as `Saver.save`.
        """
        run = None
        round_ = progress.open_round
        summary = progress.summary
        if self.monitor is not None:
            assert position is not None
            run = RunState(
                step=summary.steps,
                rounds=progress.rounds,
                prompts_taken=position[0],
                prompts_digest=position[1],
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
                choices="" if self.choices is None else self.choices.state(position[0]),
            )
        with self.saver.ranks.busy():
            self.recorder.flush()
        tensors = round_.tensors(self.saver.ranks) if round_ is not None and self.saver.with_state else {}
        if self.saver.save(summary.steps, run, tensors, last, summary.best_step):
            self.recorder.event("saved", f"checkpoint-{summary.steps}")

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
            raise UsageError(f"{checkpoint} cannot be resumed from: its state is of another model: {error}") from error
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
            RunSummary(**state.outcome), state.rounds, published, state.skipped_in_a_row, evaluates=state.evaluates
        )


Steps = list[list[MicroBatch]]


def saved_round(
    checkpoint: Path, split: Callable[[RoundBatch], Steps]
) -> tuple[RoundBatch, Steps, Mapping[str, Any]] | None:
    """The round in the middle of which the checkpoint was saved: its batch, this rank's micro-batches with what was
    computed before training, and `OpenRound.facts`. None if it was saved between rounds. As many ranks as saved it
    split it as they did; any other number can go on too."""
    facts = RunState.read(checkpoint).round
    if facts is None:
        return None
    saved = dict(round_tensors_of(checkpoint))
    # Of a version in which each completion was a row.
    saved.setdefault("owners", torch.arange(len(saved["rewards"])))
    saved.setdefault("turn_advantages", torch.zeros(0))
    batch = RoundBatch(**{item.name: saved[item.name] for item in fields(RoundBatch)})
    known = [name for name in _BEFORE_TRAINING if name in saved]

    def filled(micro: MicroBatch) -> MicroBatch:
        places = batch.written(micro.samples)
        found = dict[str, Any]()
        for name in known:
            values = saved[name][places].to(micro.mask.device)
            values = values if name in _WIDE else values.squeeze(1)
            found[name] = micro.unflatten(values.long() if name == "teacher_ids" else values)
        return replace(micro, **found)

    return batch, [[filled(micro) for micro in step] for step in split(batch)], facts
