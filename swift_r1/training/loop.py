"""The training loop: `Trainer.begin_round` and `Trainer.train` are the whole step, in line.

    what happens                                what it makes           where

    rounds.sample: prompts, completions,        Trajectory, ScoredRound rank 0, and completions.jsonl
       |           rewards
    grpo.batch_of_round                         RoundBatch              every rank, by broadcast
       |
    split: a rank's share of each step          MicroBatch              every rank, from here on
       |
    grpo.before_training                        MicroBatch, with log-probs of the policy as it is, of the reference,
       |                                        and the critic's values
    teacher.teach                               MicroBatch, with the teacher's log-probs
       |
    advantages                                  Advantages              the same on every rank
       |
    OpenRound: all of these, and which of its optimizer steps are done
       |
       |  for each optimizer step:
       |
    grpo.train_step, ppo.critic_step            metrics; policy and critic are updated
       |
    books.step, evaluate, save                                          rank 0: logging.jsonl, checkpoint
       |
    publish: weights go to the engine, after the round's last step and before an evaluation

Every rank runs this code. Rank 0 also talks to the rollout server, scores and records; the others get the round's batch
from it and compute their share.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from swift_r1.algorithms.advantages import Advantages, group_advantages
from swift_r1.algorithms.aggregation import token_means
from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.methods import ESTIMATORS
from swift_r1.algorithms.rewards import from_flags
from swift_r1.errors import ServerUnreachable
from swift_r1.flags import Plan, RunFlags
from swift_r1.models.policy import MicroBatch
from swift_r1.record.recorder import Recorder
from swift_r1.record.spans import Spans, Stopwatch
from swift_r1.rollout.prefetch import PrefetchedRounds
from swift_r1.rollout.prompts import Positions
from swift_r1.rollout.rounds import RoundSampler
from swift_r1.rollout.turn_credit import turn_credit
from swift_r1.runtime.ranks import Ranks
from swift_r1.runtime.stopping import NOT_BETTER, StopRequest, Watchdog
from swift_r1.training import grpo, ppo, token_values
from swift_r1.training.backends.base import Backend, ReferencePolicy
from swift_r1.training.batching import Batching, RoundBatch
from swift_r1.training.bookkeeping import Bookkeeping
from swift_r1.training.checkpoint.resume import Checkpoints, RunProgress, RunSummary
from swift_r1.training.chord import Experts
from swift_r1.training.evaluation.evaluate import EvaluationLeft, Evaluator
from swift_r1.training.movement import Movement
from swift_r1.training.objectives.base import AnsweredRounds, AnswerEvaluator
from swift_r1.training.open_round import OpenRound, saved_round
from swift_r1.training.optimizer import LearningRate
from swift_r1.training.recorded import RecordedRounds
from swift_r1.training.shared_device import SharedDevice
from swift_r1.training.teachers import Teacher
from swift_r1.training.token_values import StepTokens
from swift_r1.wire.protocol import completion_seed

logger = logging.getLogger("swift_r1.training")


class _Stopped(Exception):
    """The run ends before a round."""


@dataclass(kw_only=True)
class Trainer:
    """Runs a plan. All methods are collective."""

    args: RunFlags
    plan: Plan
    ranks: Ranks
    # backend, learning_rate: of the policy
    backend: Backend
    learning_rate: LearningRate
    reference: ReferencePolicy | None
    teacher: Teacher | None
    # of PPO; None for GRPO and its kin, where the advantage is that of a completion in its group
    critic: ppo.TrainedCritic | None
    experts: Experts | None  # whose answers are learned too (CHORD)
    batching: Batching  # how a round is split into micro-batches
    rounds: RoundSampler | PrefetchedRounds | RecordedRounds | AnsweredRounds
    evaluator: Evaluator | AnswerEvaluator | None  # None where nothing is evaluated
    device: SharedDevice
    checkpoints: Checkpoints
    books: Bookkeeping
    recorder: Recorder
    stop: StopRequest
    watchdog: Watchdog
    spans: Spans
    stopwatch: Stopwatch

    def __post_init__(self) -> None:
        # a round of answers that are learned has another: `OpenRound.step`
        self.loss = from_flags(LossConfig, self.args) if self.args.generates else LossConfig()
        # the mean over the step's tokens, as for the critic; the KL is in the rewards
        if self.critic is not None:
            self.loss = replace(self.loss, loss_type="bnpo")
        self.estimator = ESTIMATORS[self.args.advantage_estimator]
        self.progress = RunProgress()

    @property
    def summary(self) -> RunSummary:
        return self.progress.summary

    def run(self) -> RunSummary:
        """Trains on all rounds, or until a stop is asked for. Raises RunFailed: loss or gradient is not finite too
        often, rewards are invalid too often, checkpoints cannot be saved, the server violated the protocol;
        ServerUnreachable: the rollout server went away."""
        self.started = time.perf_counter() - self.summary.seconds
        self.stop_asked()
        if self.args.eval_on_start and not self.summary.steps:
            self.progress.evaluates = True
        if self.progress.open_round is None or self.progress.evaluates:
            self.publish()
        if self.progress.evaluates and self.evaluator is not None and not self.stop.reason:
            self.evaluate()
        while self.summary.steps < self.plan.total_steps and not self.stop.reason:
            with suppress(_Stopped):
                self.train(self.progress.open_round or self.begin_round())
        self.summary.seconds = time.perf_counter() - self.started
        self.summary.exit_code = self.stop.exit_code
        return self.summary

    def begin_round(self) -> OpenRound:
        """Everything that a round needs once: completions, rewards, log-probs before the first update, advantages.
        Raises _Stopped: the run was told to stop, and has no server for the round; the last whole step is saved."""
        # Sample and score: completions of the next prompts (with --dynamic_sample until all groups have a signal) with
        # their rewards, on rank 0. With --async_generate they are there already, or nearly.
        self.spans.begin(self.summary.steps + 1)
        self.device.to_generate()
        epoch = self.epoch()
        positions = self.positions()
        if isinstance(self.rounds, AnsweredRounds):
            self.device.to_train()
            answered = self.rounds.take(self.progress.rounds)
            self.progress.rounds += 1
            return replace(answered, ends_epoch=self.epoch() > epoch)
        try:
            scored = self.rounds.sample(self.progress.rounds, self.summary.steps)
        except ServerUnreachable as error:
            self.stop_or_raise(error)
            if self.summary.steps:
                self.save(True, positions)
            raise _Stopped from None
        self.device.to_train()
        self.progress.rounds += 1
        with self.stopwatch.timed("wait"):  # the other ranks, for the rewards
            credit = None if scored is None else turn_credit(scored.trained, self.args)
            batch = grpo.batch_of_round(scored, self.ranks, credit=credit)

        # Log-probs of the policy as it is and of the reference; for PPO the critic's values. Then advantages.
        critic = self.critic
        updates = self.plan.optimizer_steps_per_round
        self.watchdog.progress("the log-probs before training")
        with self.stopwatch.timed("train"):
            steps = grpo.before_training(
                self.split(batch),
                self.backend,
                self.reference,
                self.args.temperature,
                old_policy=grpo.needs_old_policy(self.args, updates),
                squares=self.estimator.of_tokens is not None,
                notes_routes=self.args.router_replay_mode == "R2",
                critic=critic.backend if critic is not None else None,
            )
            if self.args.router_replay_mode == "R2":
                batch = grpo.with_noted_routes(batch, steps, self.ranks)
        moved = self.moved(batch)
        if self.teacher is not None:
            self.watchdog.progress("the teacher's log-probs")
            with self.stopwatch.timed("teacher"):
                steps = self.teacher.teach(scored, batch, steps)
        with self.stopwatch.timed("train"):
            advantages, metrics = self.advantages(batch, steps, self.summary.steps)
            metrics |= moved | grpo.advantage_size(advantages.of_completions)
            entropies = (
                grpo.completion_entropies(steps, batch, self.ranks)
                if self.args.log_entropy
                else None
            )
        if scored is not None:
            of_completions = None if entropies is None else entropies.tolist()
            of_turns = None
            if batch.turn_advantages.numel():
                of_turns = grpo.advantages_of_turns(scored.trained, advantages.values)
            known = grpo.known_advantages(batch, advantages, self.args.overlong_filter)
            scored = scored.with_advantages(known.tolist(), of_completions, of_turns)
            metrics |= self.books.round(scored, self.progress)
        updated = self.plan.completions_per_optimizer_step
        recorded = token_values.chosen(
            scored, self.summary.steps + 1, updated, self.token_share, self.ranks
        )
        # What the round took as a whole is divided among its steps.
        seconds = {name: value / updates for name, value in self.stopwatch.take().items()}
        ends_epoch = self.epoch() > epoch
        return OpenRound(
            batch, steps, advantages, metrics, seconds, ends_epoch=ends_epoch, recorded=recorded
        )

    def moved(self, batch: RoundBatch) -> dict[str, float]:
        """Returns how far the policy is from where the run began, in rounds where that is measured. Collective."""
        progress = self.progress
        with self.stopwatch.timed("train"):
            if progress.movement is None:
                self.progress.movement = Movement.of_round(
                    batch, self.backend, self.batching, self.ranks
                )
            elif progress.movement.due(progress.rounds):
                return progress.movement.metrics(self.backend, self.batching, self.ranks)
        return {}

    @property
    def token_share(self) -> float:
        """`--log_tokens`: the share of the prompts that are in the token record."""
        groups = (
            self.args.log_tokens_groups
            * self.plan.num_generations
            / self.plan.completions_per_optimizer_step
        )
        return {"all": 1.0, "sample": groups, "none": 0.0}[self.args.log_tokens]

    def epoch(self) -> int:
        """Passes over the prompts that are complete; 0 where they are not counted."""
        places = self.rounds.positions.values() if self.ranks.is_rank0 else ()
        taken = sum(one.taken for one in places)
        return int(self.ranks.max(float(taken // (self.plan.prompts_per_epoch or sys.maxsize))))

    def split(self, batch: RoundBatch) -> list[list[MicroBatch]]:
        """This rank's micro-batches of each optimizer step of one pass over the round."""
        steps = len(batch) // self.plan.completions_per_optimizer_step
        return grpo.split_round(batch, steps, self.batching, self.ranks)

    def advantages(
        self, batch: RoundBatch, steps: list[list[MicroBatch]], step: int
    ) -> tuple[Advantages, dict[str, float]]:
        """Returns the advantages from the rewards of the whole round, which began after `step` optimizer steps, on
        every rank; and what to log of them."""
        if self.critic is not None:
            return ppo.token_advantages(batch, steps, self.critic.config, self.ranks)
        rewards = batch.rewards
        metrics = {}
        if self.args.kl_in_reward:
            rewards = grpo.rewards_after_kl(batch, steps, self.args.beta, self.ranks)
            metrics["kl_penalty"] = (batch.rewards - rewards).nanmean().item()
        method = self.args.distillation
        if method is not None and method.needs_old_logps:
            mask = batch.token_mask()
            old = grpo.of_round("old_logps", batch, steps, self.ranks)
            teachers = grpo.of_round("teacher_logps", batch, steps, self.ranks)
            metrics["teacher_kl"] = (old - teachers)[mask].mean().item()
            if method.rewards is not None:
                rewards = method.rewards(rewards, old, teachers, mask, self.args)
        if self.estimator.of_tokens is not None:
            of_tokens = grpo.advantages_of_tokens(
                rewards, batch, steps, self.estimator, self.loss, self.ranks
            )
            mask = batch.token_mask()
            return Advantages(of_tokens, token_means(of_tokens, mask.float())), metrics
        values = group_advantages(
            rewards,
            self.plan.num_generations,
            estimator=self.estimator.name,
            scale_rewards=self.args.scale_rewards,  # type: ignore[arg-type]  # checked by the parser
        )
        if self.loss.loss.labels is not None:
            values = self.loss.loss.labels(values, rewards.isfinite(), self.plan.num_generations)
        of_rows = values[batch.owners]
        if batch.turn_advantages.numel():
            mask = batch.token_mask()
            of_rows = mask * (of_rows[:, None] + batch.padded(batch.turn_advantages))
            tokens = batch.of_completions(mask.sum(1).float())
            values = batch.of_completions(of_rows.sum(1)) / tokens.clamp(min=1)
        if method is None or method.advantages is None:
            return Advantages(of_rows, values), metrics
        per_token, more = method.advantages(values, old, teachers, mask, self.args, step)
        metrics |= more
        return Advantages(per_token, token_means(per_token, mask.float())), metrics

    def train(self, round_: OpenRound) -> None:
        """Takes the optimizer steps of a round that are left, until a stop."""
        args = self.args
        progress = self.progress
        critic = self.critic
        updates = [
            micro_batches for _ in range(args.num_iterations) for micro_batches in round_.steps
        ]
        progress.open_round = round_
        while progress.open_round is not None and not self.stop.reason:
            micro_batches = updates[round_.done]
            self.spans.begin(self.summary.steps + 1)
            self.watchdog.progress("an optimizer step")
            self.device.to_train()
            with self.stopwatch.timed("train"):
                # Loss and update: of the policy, except while only the critic warms up, then of the critic. One after
                # the other, so that the activations of one are in memory at a time.
                tokens = round_.tokens()
                frozen = critic is not None and self.summary.steps < args.critic_warmup_steps
                before = grpo.weight_sample(self.backend.model)
                metrics = round_.metrics | self.policy_step(micro_batches, round_, tokens, frozen)
                if self.loss.entropy_coef:
                    metrics["entropy_coef"] = self.loss.entropy_coef
                if args.router_replay_mode != "disabled":
                    metrics |= grpo.end_replay(self.backend, self.ranks)
                metrics |= grpo.changed_share(
                    before, grpo.weight_sample(self.backend.model), self.ranks
                )
                if (
                    tokens is not None
                    and (rows := tokens.rows(round_.advantages.values, self.ranks)) is not None
                ):
                    self.recorder.tokens(self.summary.steps + 1, rows)
                self.learning_rate.advance()
                if critic is not None:
                    metrics |= ppo.critic_step(micro_batches, round_.advantages, critic, self.ranks)
                    critic.learning_rate.advance()
            self.summary.steps += 1
            step = self.summary.steps
            self.books.check_finite(metrics, round_, progress)
            if args.sync_ref_model:
                due = step % args.ref_model_sync_steps == 0
                if due and self.reference is not None:
                    self.reference.mix_in_policy(args.ref_model_mixup_alpha)
                metrics["ref_model_synced"] = float(due)
            round_.done += 1
            complete = step == self.plan.total_steps
            if complete or round_.done == len(updates):
                progress.open_round = None
            progress.ended_epoch = progress.open_round is None and round_.ends_epoch

            # Weight sync, log, evaluation, checkpoint.
            self.stop_asked()
            progress.evaluates = args.eval_strategy != "no" and (
                complete or self.due(args.eval_strategy, args.eval_steps, args.eval_unit)
            )
            if progress.open_round is None or progress.evaluates:
                self.publish()
            self.books.step(metrics, round_, step, complete)
            if progress.evaluates and not self.stop.reason:
                self.evaluate()
            stops = complete or bool(self.stop.reason)
            if stops or self.due(args.save_strategy, args.save_steps):
                self.save(stops, self.positions())

    def policy_step(
        self,
        micro_batches: Sequence[MicroBatch],
        round_: OpenRound,
        tokens: StepTokens | None,
        frozen: bool,
    ) -> dict[str, float]:
        """The policy's loss and update."""
        rate = self.learning_rate.value
        if round_.step is not None:
            return round_.step(micro_batches, rate)
        return grpo.train_step(
            micro_batches,
            round_.advantages.values,
            self.backend,
            self.loss,
            self.args.temperature,
            rate,
            self.ranks,
            frozen,
            tokens,
            None if self.experts is None else self.experts.step(self.summary.steps),
            round_.batch.owners,
            completion_seed(self.args.seed, "tokens", self.summary.steps),
        )

    def publish(self) -> None:
        """Sends the current weights to the engine, once for each step."""
        if self.progress.published != self.summary.steps:
            self.watchdog.progress("the weight sync")
            self.device.to_publish()
            with self.stopwatch.timed("sync"):
                try:
                    self.rounds.publish_weights(
                        self.progress.rounds, self.progress.open_round is not None
                    )
                except ServerUnreachable as error:
                    self.stop_or_raise(error)
                    return
            self.progress.published = self.summary.steps

    def stop_asked(self) -> bool:
        """Whether any rank was told to stop, or time is up; all ranks learn it at the same step."""
        self.stop.reason = int(self.ranks.max(self.stop.due()))
        return bool(self.stop.reason)

    def stop_or_raise(self, error: ServerUnreachable) -> None:
        """Raises an error of all ranks, unless the run was told to stop."""
        if not self.stop_asked():
            raise error
        logger.warning("%s: what was done before is saved", error)

    def positions(self) -> Positions | None:
        """Returns how far the run is in the prompts, on rank 0."""
        return self.rounds.positions if self.ranks.is_rank0 else None

    def due(self, strategy: str | None, every: int | None, unit: str = "step") -> bool:
        """Whether a `--save_strategy` or `--eval_strategy` asks for something after this step."""
        if strategy == "epoch":
            return self.progress.ended_epoch
        if strategy == "no" or every is None:
            return False
        if unit == "rollout":
            return self.progress.open_round is None and self.progress.rounds % every == 0
        return self.summary.steps % every == 0

    def evaluate(self) -> None:
        """Evaluates the published weights on the held-out prompts, unless a signal comes meanwhile: then the run ends,
        and does so when it is resumed. It also ends where saves are not better any more."""
        assert self.evaluator is not None
        args = self.args
        steps = self.summary.steps
        self.watchdog.progress("an evaluation")
        self.device.to_generate()
        self.recorder.phase("evaluating", self.evaluator.num_completions)
        with self.ranks.busy(), self.stopwatch.timed("evaluate"):
            try:
                found = self.evaluator.run(steps, lambda: self.stop.signalled)
            except EvaluationLeft:
                self.stop_asked()
                return
            finally:
                self.recorder.phase_end()
            self.progress.evaluates = False
            if found is not None:
                metrics, rows = found
                self.recorder.evaluation(steps, metrics, rows)
                self.summary.saw_evaluation(metrics)
                saves = steps == self.plan.total_steps or self.due(
                    args.save_strategy, args.save_steps
                )
                if saves and steps and args.metric_for_best_model is not None:
                    self.summary.saw_checkpoint(
                        metrics, args.metric_for_best_model, args.greater_is_better
                    )
        if self.ranks.max(self.summary.saves_since_best) >= (
            args.early_stop_interval or sys.maxsize
        ):
            self.stop.reason = NOT_BETTER
        self.stopwatch.take()

    def save(self, last: bool, positions: Positions | None) -> None:
        """Raises as `Checkpoints.save`; `positions` as there."""
        self.watchdog.progress("a save")
        self.device.to_save()
        self.summary.seconds = time.perf_counter() - self.started
        with self.stopwatch.timed("save"):
            self.checkpoints.save(self.progress, positions, last)

    def resume(self, checkpoint: Path) -> None:
        """Goes on after the step of a checkpoint, also one in the middle of a round. Before `run`. Raises UsageError:
        the state is not of this model."""
        self.progress = self.checkpoints.restore(checkpoint)
        saved = saved_round(checkpoint, self.split)
        if saved:
            batch, steps, facts = saved
            advantages, _ = self.advantages(batch, steps, self.summary.steps - facts["done"])
            self.progress.open_round = OpenRound(batch, steps, advantages, **facts)
