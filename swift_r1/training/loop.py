"""The training loop, top to bottom: prompts, completions, rewards, advantages, optimizer steps, weights, log.

Every rank runs this same code. The main rank also holds the prompts, talks to the rollout server, scores and
records; the others are told the round's batch and compute their share of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from swift_r1.errors import RunFailed
from swift_r1.sampling.prefetch import open_collector
from swift_r1.sampling.scoring import (
    ScoredRound,
    completion_metrics,
    completion_row,
    pooled_columns,
    reward_metrics,
)
from swift_r1.tracking.metrics import Stopwatch
from swift_r1.training.algorithm import Algorithm, Targets, judged
from swift_r1.training.batch.batching import RoundBatch
from swift_r1.training.checkpoint.open_round import OpenRound, batch_of, with_saved, write_step
from swift_r1.training.checkpoint.resume import Progress, captured, restored
from swift_r1.training.checkpoint.run_state import RunState
from swift_r1.training.checkpoint.saving import round_tensors_of
from swift_r1.training.context import Parts
from swift_r1.training.evaluate import Evaluation
from swift_r1.training.grpo import Grpo
from swift_r1.training.memory import GIB, peak_bytes
from swift_r1.training.ppo import Ppo
from swift_r1.training.shared_device import SharedDevice
from swift_r1.training.step import TrainingBatch, deal_round, training_batches
from swift_r1.training.summary import Outcome

logger = logging.getLogger("swift_r1.training")


class Trainer:
    """Runs a plan. All methods are collective."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.args, self.plan = parts, parts.args, parts.plan
        self.algorithm: Algorithm = Grpo(parts) if parts.critic is None else Ppo(parts)
        self.progress = Progress()
        self.stopwatch = Stopwatch()
        self.collector = open_collector(parts, self.stopwatch)
        self.device = SharedDevice(parts, self.stopwatch)
        self.started = time.perf_counter()

    @property
    def outcome(self) -> Outcome:
        return self.progress.outcome

    def run(self) -> Outcome:
        """All rounds, or those until a stop was asked for.

        Raises:
            RunFailed: loss or gradient is not finite too often, rewards are invalid too often, checkpoints cannot be
                saved, the server broke its word.
            ServerUnreachable: the rollout server went away.
        """
        self.started = time.perf_counter() - self.outcome.seconds
        self.stop_asked()
        if self.progress.open_round is None:
            self.publish()
        if self.args.eval_on_start and not self.outcome.steps:
            self.evaluate()
        while self.outcome.steps < self.plan.total_steps and not self.parts.stop.reason:
            self.train(self.progress.open_round or self.begin_round())
        self.outcome.seconds = time.perf_counter() - self.started
        self.outcome.exit_code = self.parts.stop.exit_code
        return self.outcome

    def begin_round(self) -> OpenRound:
        """Rolls out and scores one batch of prompts."""
        self.device.to_generate()
        batch, scored = self.collector.roll_out(self.progress.rounds, self.outcome.steps)
        self.device.to_train()
        self.progress.rounds += 1
        steps = self.prepare(batch)
        targets, metrics = self.targets(batch, steps)
        if scored is not None:
            metrics |= self.report(scored, targets.of_completions)
        # What the round cost as a whole is shared out to its steps.
        seconds = {name: value / self.plan.optimizer_steps_per_round for name, value in self.stopwatch.take().items()}
        return OpenRound(batch, steps, targets, metrics, seconds)

    def train(self, round_: OpenRound) -> None:
        """Takes the optimizer steps that the round is for, or those that are left of them, until a stop."""
        updates = [micro_batches for _ in range(self.args.num_iterations) for micro_batches in round_.steps]
        self.progress.open_round = round_
        while self.progress.open_round is not None and not self.parts.stop.reason:
            metrics = round_.metrics | self.update(updates[round_.done], round_.targets)
            if self.progress.skipped_in_a_row:
                self.set_aside(round_, metrics)
            round_.done += 1
            complete = self.outcome.steps == self.plan.total_steps
            if complete or round_.done == len(updates):
                self.progress.open_round = None
            stops = self.stop_asked()
            evaluates = self.evaluates_now(complete)
            if self.progress.open_round is None or evaluates:
                self.publish()
            self.record(metrics, round_, complete)
            if evaluates:
                self.evaluate()
            if complete or stops or self.outcome.steps % self.args.save_steps == 0:
                self.save(complete or stops)

    def save(self, last: bool) -> None:
        """A checkpoint of the run as it is after this step.

        Raises:
            RunFailed: see `Saver.save`.
        """
        parts, outcome = self.parts, self.outcome
        parts.watchdog.progress("a save")
        self.device.to_save()
        outcome.seconds = time.perf_counter() - self.started
        parts.saver.save(outcome.steps, captured(self.progress, parts, self.collector), last, outcome.best_step)

    def resume(self, checkpoint: Path) -> None:
        """Goes on after the step of a checkpoint. Before `run`.

        Raises:
            UsageError: the state is not of this model.
        """
        self.progress = restored(checkpoint, self.parts)
        if round_ := RunState.read(checkpoint).round:
            self.progress.open_round = self.reopen(round_tensors_of(checkpoint), **round_)

    def reopen(
        self, saved: Mapping[str, Tensor], done: int, metrics: dict[str, float], seconds: dict[str, float]
    ) -> OpenRound:
        """A round in the middle as it was saved."""
        batch = batch_of(saved)
        dealt = deal_round(batch, self.steps_per_pass, self.parts.cut, self.parts.ranks)
        steps = with_saved(training_batches(dealt, self.args.overlong_filter), saved, self.parts.ranks.rank)
        targets, _ = self.targets(batch, steps)
        return OpenRound(batch, steps, targets, metrics, seconds, done)

    @property
    def steps_per_pass(self) -> int:
        """Optimizer steps that see each of a round's completions once."""
        return self.plan.completions_per_round // self.plan.completions_per_optimizer_step

    def prepare(self, batch: RoundBatch) -> list[list[TrainingBatch]]:
        """This rank's micro-batches of each optimizer step, with what the weights before the first one say of them."""
        self.parts.watchdog.progress("the log-probs before training")
        with self.stopwatch.timed("train"):
            return self.algorithm.prepared(deal_round(batch, self.steps_per_pass, self.parts.cut, self.parts.ranks))

    def targets(self, batch: RoundBatch, steps: Sequence[Sequence[TrainingBatch]]) -> tuple[Targets, dict[str, float]]:
        """Advantages from the rewards of the whole round, on every rank; and what there is to log of them."""
        with self.stopwatch.timed("train"):
            return self.algorithm.targets(batch, steps)

    def report(self, scored: ScoredRound, advantages: Tensor) -> dict[str, float]:
        """Writes the round's completions down, checks that rewards are valid often enough, and gives its metrics.

        Rewards and lengths are averaged over all that was generated: those of replaced groups too.

        Raises:
            RunFailed: rewards are invalid too often.
        """
        main, recorder, step = self.parts.main, self.parts.recorder, self.outcome.steps + 1
        assert main is not None
        rows = [completion_row(item, step, a) for item, a in zip(scored.trained, advantages.tolist(), strict=True)]
        with self.parts.ranks.busy():
            recorder.completions(rows + [completion_row(item, step, None, dropped=True) for item in scored.dropped])
        for part in scored.parts:
            main.monitor.update(part.columns, part.batch)
        everything = scored.trained + scored.dropped
        metrics = reward_metrics(everything, pooled_columns(scored.parts)) | completion_metrics(everything)
        metrics["rollout/weight_version"] = float(min(item.completion.weight_version for item in everything))
        if self.args.dynamic_sample:
            metrics["dynamic_sample/resampled"] = len(scored.dropped) / self.plan.num_generations
            metrics["dynamic_sample/kept_without_signal"] = float(scored.without_signal)
        self.outcome.saw_reward(metrics["reward"])
        return metrics | scored.metrics

    def update(self, micro_batches: Sequence[TrainingBatch], targets: Targets) -> dict[str, float]:
        """One optimizer step, and the reference policy's where it is due; `skipped` is 1 where a model was not updated
        since its loss or gradient is not finite."""
        parts, args = self.parts, self.args
        parts.watchdog.progress("an optimizer step")
        self.device.to_train()
        with self.stopwatch.timed("train"):
            metrics = self.algorithm.step(micro_batches, targets, self.outcome.steps)
        self.outcome.steps += 1
        verdict = judged(metrics, self.algorithm.trained)
        metrics["skipped"] = float(bool(verdict.faults))
        if verdict.overflows and parts.ranks.is_main:
            # How a loss scale is found: no fault of the step.
            for model in self.algorithm.trained:
                if model.grad_norm in verdict.faults:
                    logger.info(
                        "step %d is skipped: its gradient overflows float16; the loss scale was %g and is now %g",
                        *(self.outcome.steps, metrics[model.loss_scale], model.backend.loss_scale),
                    )
        at_fault = verdict.faults and not verdict.overflows
        self.progress.skipped_in_a_row = self.progress.skipped_in_a_row + 1 if at_fault else 0
        if args.sync_ref_model:
            due = self.outcome.steps % args.ref_model_sync_steps == 0
            if due and parts.reference is not None:
                parts.reference.mix_in_policy(args.ref_model_mixup_alpha)
            metrics["ref_model_synced"] = float(due)
        return metrics

    def set_aside(self, round_: OpenRound, metrics: dict[str, float]) -> None:
        """Writes down what a step was skipped on.

        Raises:
            RunFailed: too many were skipped one after another.
        """
        what = " and ".join(judged(metrics, self.algorithm.trained).faults)
        if self.parts.main is not None:
            path = self.parts.saver.run_dir / "skipped" / f"step-{self.outcome.steps}.safetensors"
            with self.parts.ranks.busy():
                write_step(round_, self.steps_per_pass, path)
            logger.warning("step %d is skipped: %s not finite; its batch is in %s", self.outcome.steps, what, path)
        if self.progress.skipped_in_a_row > self.args.max_skipped_steps:
            raise RunFailed(
                f"{what} not finite at step {self.outcome.steps}, {self.progress.skipped_in_a_row} steps in a row were "
                f"skipped (--max_skipped_steps {self.args.max_skipped_steps}): try a lower learning rate"
            )

    def publish(self) -> None:
        """Gives the current weights to whoever generates, once for each step."""
        if self.progress.published != self.outcome.steps:
            self.parts.watchdog.progress("the weights' way to the engine")
            self.device.to_publish()
            with self.stopwatch.timed("sync"):
                self.collector.publish(self.progress.rounds, self.progress.open_round is not None)
            self.progress.published = self.outcome.steps

    def evaluates_now(self, complete: bool) -> bool:
        if not self.args.eval_steps or self.parts.stop.reason:
            return False
        if self.args.eval_unit == "rollout":
            round_over = self.progress.open_round is None
            return complete or (round_over and self.progress.rounds % self.args.eval_steps == 0)
        return complete or self.outcome.steps % self.args.eval_steps == 0

    def evaluate(self) -> None:
        """Evaluates the published weights on the held-out prompts."""
        parts, main = self.parts, self.parts.main
        assert parts.evaluator is not None
        parts.watchdog.progress("an evaluation")
        self.device.to_generate()
        parts.recorder.phase("evaluating", parts.evaluator.num_completions)
        with parts.ranks.busy():
            evaluation = parts.evaluator.run(
                parts.turns,
                main,
                self.outcome.steps,
                self.plan.total_steps,
                parts.completions_done,
            )
            parts.recorder.phase_end()
            if evaluation is not None:
                self.report_evaluation(evaluation)
        self.stopwatch.take()

    def report_evaluation(self, evaluation: Evaluation) -> None:
        steps, args = self.outcome.steps, self.args
        self.parts.recorder.evaluation(steps, evaluation.metrics, evaluation.rows)
        self.outcome.saw_evaluation(evaluation.metrics)
        saves = steps == self.plan.total_steps or steps % args.save_steps == 0
        if saves and steps and args.metric_for_best_model is not None:
            self.outcome.saw_checkpoint(evaluation.metrics, args.metric_for_best_model, args.greater_is_better)

    def stop_asked(self) -> bool:
        """Whether any rank was told to stop, or time is up; all ranks learn it at the same step."""
        stop = self.parts.stop
        stop.reason = int(self.parts.ranks.max(stop.due()))
        return bool(stop.reason)

    def record(self, metrics: dict[str, float], round_: OpenRound, last: bool) -> None:
        own = self.stopwatch.take()
        parts = ("generate", "reward", "train", "sync", *self.device.timed)
        times = {f"time/{name}": round_.seconds.get(name, 0.0) + own.get(name, 0.0) for name in parts}
        seconds = sum(times.values())
        tokens = int(round_.batch.loss_mask.sum()) / self.plan.optimizer_steps_per_round
        times |= {"time/step": seconds, "tokens_per_second": tokens / seconds}
        times["memory/peak_gib"] = self.parts.ranks.max(peak_bytes(self.parts.ranks.device)) / GIB
        metrics = metrics | times | self.parts.rollouts.take_metrics()
        with self.parts.ranks.busy():
            self.parts.recorder.step(self.outcome.steps, metrics, last)
