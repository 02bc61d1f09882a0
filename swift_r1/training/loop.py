"""The training loop, top to bottom: prompts, completions, rewards, advantages, optimizer steps, weights, log.

Every rank runs this same code. The main rank also holds the prompts, talks to the rollout server, scores and
records; the others are told the round's batch and compute their share of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swift_r1.algorithms import LossConfig, group_advantages, groups_without_signal
from swift_r1.arguments import Plan, RlhfArguments
from swift_r1.data.types import Prompt
from swift_r1.errors import RunFailed, UsageError
from swift_r1.rewards.combine import Composition
from swift_r1.rewards.monitor import InvalidRewardMonitor
from swift_r1.rollout.protocol import RolloutRequest, SamplingParams
from swift_r1.tracking.recorder import Recorder
from swift_r1.training.backends.base import Backend, ReferencePolicy
from swift_r1.training.batching import Cut, RoundBatch, round_batch
from swift_r1.training.distributed import Ranks
from swift_r1.training.evaluate import Evaluator
from swift_r1.training.multi_turn import Turns
from swift_r1.training.open_round import OpenRound, batch_of, round_tensors, with_saved, write_step
from swift_r1.training.optimizer import LearningRate
from swift_r1.training.prompts import PromptStream
from swift_r1.training.rng import restore_rng
from swift_r1.training.rollouts import Rollouts, completion_seed, ignore_output
from swift_r1.training.run_state import Fingerprint, RunState, log_sizes
from swift_r1.training.saving import Saved, Saver, optimizer_tensors, reference_tensors, rng_of, round_tensors_of
from swift_r1.training.scoring import (
    OpenRewards,
    ScoredRound,
    Scores,
    Scoring,
    completion_metrics,
    completion_row,
    loss_mask,
    pooled_columns,
    reward_metrics,
)
from swift_r1.training.step import (
    TrainingBatch,
    before_training,
    deal_round,
    needs_old_policy,
    rewards_after_kl,
    train_step,
    training_batches,
)
from swift_r1.training.stopping import StopRequest
from swift_r1.training.summary import Outcome
from swift_r1.training.watchdog import Watchdog

logger = logging.getLogger("swift_r1.training")


@dataclass(frozen=True)
class MainRank:
    """What only the main rank has: the prompts and the rewards."""

    prompts: PromptStream
    open_rewards: OpenRewards
    monitor: InvalidRewardMonitor
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Parts:
    """What the loop works with; `main` is None on the other ranks."""

    args: RlhfArguments
    plan: Plan
    ranks: Ranks
    backend: Backend
    reference: ReferencePolicy | None
    rollouts: Rollouts
    turns: Turns
    learning_rate: LearningRate
    sampling: SamplingParams
    cut: Cut
    evaluator: Evaluator | None
    recorder: Recorder
    saver: Saver
    stop: StopRequest
    watchdog: Watchdog
    run_id: str
    fingerprint: Fingerprint
    main: MainRank | None


class Trainer:
    """Runs a plan. All methods are collective."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.args, self.plan = parts, parts.args, parts.plan
        self.config = LossConfig.from_flags(parts.args)
        self.outcome = Outcome()
        self.rounds = 0
        self.published = -1
        self.open_round: OpenRound | None = None
        self.started = time.perf_counter()
        self.skipped_in_a_row = 0
        self.seconds: dict[str, float] = {}

    def run(self) -> Outcome:
        """All rounds, or those until a stop was asked for.

        Raises:
            RunFailed: loss or gradient is not finite too often, rewards are invalid too often, checkpoints cannot be
                saved, the server broke its word.
            ServerUnreachable: the rollout server went away.
        """
        self.started = time.perf_counter() - self.outcome.seconds
        self.stop_asked()
        if self.open_round is None:
            self.publish()
        if self.args.eval_on_start and not self.outcome.steps:
            self.evaluate()
        while self.outcome.steps < self.plan.total_steps and not self.parts.stop.reason:
            self.train(self.open_round or self.begin_round())
        self.outcome.seconds = time.perf_counter() - self.started
        self.outcome.exit_code = self.parts.stop.exit_code
        return self.outcome

    def begin_round(self) -> OpenRound:
        """Rolls out and scores one batch of prompts."""
        batch, scored = self.roll_out()
        steps = self.prepare(batch)
        advantages, metrics = self.advantages(batch, steps)
        if scored is not None:
            metrics |= self.report(scored, advantages)
        # What the round cost as a whole is shared out to its steps.
        seconds = {name: value / self.plan.optimizer_steps_per_round for name, value in self.take_seconds().items()}
        return OpenRound(batch, steps, advantages, metrics, seconds)

    def train(self, round_: OpenRound) -> None:
        """Takes the optimizer steps that the round is for, or those that are left of them, until a stop."""
        updates = [micro_batches for _ in range(self.args.num_iterations) for micro_batches in round_.steps]
        self.open_round = round_
        while self.open_round is not None and not self.parts.stop.reason:
            metrics = round_.metrics | self.update(updates[round_.done], round_.advantages)
            if self.skipped_in_a_row:
                self.set_aside(round_, metrics)
            round_.done += 1
            complete = self.outcome.steps == self.plan.total_steps
            if complete or round_.done == len(updates):
                self.open_round = None
            stops = self.stop_asked()
            evaluates = self.evaluates_now(complete)
            if self.open_round is None or evaluates:
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
        parts, main, round_ = self.parts, self.parts.main, self.open_round
        parts.watchdog.progress("a save")
        self.outcome.seconds = time.perf_counter() - self.started
        run = None
        if main is not None:
            facts = round_ and {"done": round_.done, "metrics": round_.metrics, "seconds": round_.seconds}
            run = RunState(
                step=self.outcome.steps,
                rounds=self.rounds,
                prompts_taken=main.prompts.taken,
                published=self.published,
                weight_version=parts.rollouts.weight_version,
                run_id=parts.run_id,
                skipped_in_a_row=self.skipped_in_a_row,
                outcome=self.outcome.to_dict(),
                window=parts.recorder.window(),
                rewards=main.monitor.state(),
                round=facts,
                logs=log_sizes(parts.saver.run_dir),
                fingerprint=parts.fingerprint,
            )
        tensors = round_tensors(round_, parts.ranks) if round_ and parts.saver.with_state else {}
        parts.saver.save(self.outcome.steps, Saved(run, tensors), last, self.outcome.best_step)

    def resume(self, checkpoint: Path) -> None:
        """Goes on after the step of a checkpoint; prompts are at their place already. Before `run`.

        Raises:
            UsageError: the state is not of this model.
        """
        parts, state = self.parts, RunState.read(checkpoint)
        try:
            parts.backend.load_training_state(optimizer_tensors(checkpoint))
            if self.args.sync_ref_model and parts.reference is not None:
                parts.reference.load_weights(reference_tensors(checkpoint))
        except (KeyError, RuntimeError) as error:
            raise UsageError(f"{checkpoint} cannot be resumed from: its state is of another model: {error}") from error
        parts.learning_rate.go_to(state.step)
        self.outcome = Outcome(**state.outcome)
        self.rounds, self.published = state.rounds, state.published
        self.skipped_in_a_row = state.skipped_in_a_row
        if parts.main is not None:
            parts.main.monitor.restore(state.rewards)
            parts.recorder.restore_window(state.window)
        parts.rollouts.resume(state.weight_version)
        if state.round is None:
            # To be published again as what it was.
            parts.rollouts.resume(state.weight_version - 1)
            self.published = -1
        else:
            self.open_round = self.reopen(round_tensors_of(checkpoint), **state.round)
        if rng := rng_of(checkpoint, parts.ranks.rank):
            restore_rng(rng)

    def reopen(
        self, saved: Mapping[str, Tensor], done: int, metrics: dict[str, float], seconds: dict[str, float]
    ) -> OpenRound:
        """A round in the middle as it was saved."""
        batch = batch_of(saved)
        dealt = deal_round(batch, self.steps_per_pass, self.parts.cut, self.parts.ranks)
        steps = with_saved(training_batches(dealt, self.args.overlong_filter), saved, self.parts.ranks.rank)
        advantages, _ = self.advantages(batch, steps)
        return OpenRound(batch, steps, advantages, metrics, seconds, done)

    def roll_out(self) -> tuple[RoundBatch, ScoredRound | None]:
        """Completions and rewards of the coming round: the batch is the same on every rank, the rest on the main one.

        With `--dynamic_sample`, prompts whose group has no signal are replaced by the next prompts of the data, and
        those again, at most `--max_resample_times` times.
        """
        parts, size = self.parts, self.plan.num_generations
        self.rounds += 1
        asked = self.plan.prompts_per_round
        first = self.sample(asked, 0)
        scored = ScoredRound(list(first.completions), [], [first], 0) if first else None
        if self.args.dynamic_sample:
            silent = self.without_signal(scored)
            for _ in range(self.args.max_resample_times):
                if not silent:
                    break
                fresh = self.sample(len(silent), asked)
                asked += len(silent)
                if scored and fresh:
                    scored.replace_groups(silent, fresh, size)
                silent = self.without_signal(scored)
        if scored is None:
            return RoundBatch(*parts.ranks.broadcast(None)), None
        batch = round_batch(
            [item.prompt.token_ids for item in scored.trained],
            [item.completion.token_ids for item in scored.trained],
            [item.completion.logprobs for item in scored.trained],
            [item.objective for item in scored.trained],
            [item.completion.finish_reason == "length" for item in scored.trained],
            [loss_mask(item.completion) for item in scored.trained],
        )
        if parts.ranks.world_size > 1:
            parts.ranks.broadcast(batch.tensors())
        return batch, scored

    def sample(self, count: int, first: int) -> Scores | None:
        """Completions of the next `count` prompts and their rewards, on the main rank.

        Rewards are computed while other completions are still generated; `time/reward` is what is left of that.
        `first` is how many prompts this round has asked for already.
        """
        parts, main, recorder = self.parts, self.parts.main, self.parts.recorder
        prompts = main.prompts.take(count) if main else []
        requests = [
            RolloutRequest(
                request_id=f"{parts.run_id}/{self.rounds - 1}/{position}",
                prompt_token_ids=prompt.token_ids,
                n=self.plan.num_generations,
                seeds=tuple(
                    completion_seed(self.args.seed, self.rounds - 1, position, prompt.prompt_id, index)
                    for index in range(self.plan.num_generations)
                ),
                sampling=parts.sampling,
            )
            for position, prompt in enumerate(prompts, start=first)
        ]
        scoring = self.scoring(prompts, requests, first) if main else None
        recorder.phase("generating", count * self.plan.num_generations)
        parts.watchdog.progress("generation")
        with self.timed("generate"):
            parts.turns.generate(
                prompts,
                requests if main else None,
                self.completions_done,
                scoring.add if scoring else ignore_output,
            )
        recorder.phase_end()
        if scoring is None:
            return None
        parts.watchdog.progress("the rewards")
        with self.timed("reward"):
            return scoring.result()

    def scoring(self, prompts: Sequence[Prompt], requests: Sequence[RolloutRequest], first: int) -> Scoring:
        """Takes completions of these prompts as they come, and has their rewards at the end."""
        main = self.parts.main
        assert main is not None
        return Scoring(
            prompts,
            [request.request_id for request in requests],
            main.decode,
            main.open_rewards,
            Composition.from_flags(self.args),
            {"global_step": self.outcome.steps, "max_steps": self.plan.total_steps},
            first_group=first,
        )

    def completions_done(self, count: int) -> None:
        """`count` more completions have ended."""
        self.parts.watchdog.progress("generation")
        self.parts.recorder.phase_advance(count)

    def without_signal(self, scored: ScoredRound | None) -> list[int]:
        """Which of the round's groups teach nothing, by place; every rank learns it, so that all go on alike."""
        found = None
        if scored is not None:
            rewards = torch.tensor([item.objective for item in scored.trained])
            silent = groups_without_signal(rewards, self.plan.num_generations)
            found = [silent.nonzero().flatten()]
            scored.without_signal = int(silent.sum())
        return self.parts.ranks.broadcast(found)[0].tolist()

    @property
    def steps_per_pass(self) -> int:
        """Optimizer steps that see each of a round's completions once."""
        return self.plan.completions_per_round // self.plan.completions_per_optimizer_step

    def prepare(self, batch: RoundBatch) -> list[list[TrainingBatch]]:
        """This rank's micro-batches of each optimizer step, with old and reference log-probs where needed."""
        self.parts.watchdog.progress("the log-probs before training")
        with self.timed("train"):
            return before_training(
                deal_round(batch, self.steps_per_pass, self.parts.cut, self.parts.ranks),
                self.parts.backend,
                self.parts.reference,
                self.args.temperature,
                old_policy=needs_old_policy(self.config, self.plan.optimizer_steps_per_round),
                overlong_filter=self.args.overlong_filter,
            )

    def advantages(
        self, batch: RoundBatch, steps: Sequence[Sequence[TrainingBatch]]
    ) -> tuple[Tensor, dict[str, float]]:
        """Float32 `[N]` from the rewards of the whole round, on every rank; and what there is to log of them."""
        rewards, metrics = batch.rewards, {}
        if self.args.kl_in_reward:
            with self.timed("train"):
                rewards = rewards_after_kl(rewards, steps, self.args.beta, self.parts.ranks)
            metrics["kl_penalty"] = (batch.rewards - rewards).nanmean().item()
        advantages = group_advantages(
            rewards,
            self.plan.num_generations,
            estimator=self.args.advantage_estimator,
            scale_rewards=self.args.scale_rewards,
        )
        return advantages, metrics

    def report(self, scored: ScoredRound, advantages: Tensor) -> dict[str, float]:
        """Writes the round's completions down, checks that rewards are valid often enough, and gives its metrics.

        Rewards and lengths are averaged over all that was generated: those of replaced groups too.

        Raises:
            RunFailed: rewards are invalid too often.
        """
        main, recorder, step = self.parts.main, self.parts.recorder, self.outcome.steps + 1
        assert main is not None
        rows = [completion_row(item, step, a) for item, a in zip(scored.trained, advantages.tolist(), strict=True)]
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
        return metrics

    def update(self, micro_batches: Sequence[TrainingBatch], advantages: Tensor) -> dict[str, float]:
        """One optimizer step, and the reference policy's where it is due; `skipped` is 1 where it updated nothing."""
        parts, args = self.parts, self.args
        parts.watchdog.progress("an optimizer step")
        with self.timed("train"):
            rate = parts.learning_rate.value
            metrics = train_step(
                micro_batches, advantages, parts.backend, self.config, args.temperature, rate, parts.ranks
            )
        parts.learning_rate.advance()
        self.outcome.steps += 1
        finite = all(math.isfinite(metrics[name]) for name in ("loss", "grad_norm"))
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        metrics["skipped"] = float(not finite)
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
        what = " and ".join(name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name]))
        if self.parts.main is not None:
            path = self.parts.saver.run_dir / "skipped" / f"step-{self.outcome.steps}.safetensors"
            write_step(round_, self.steps_per_pass, path)
            logger.warning("step %d is skipped: %s not finite; its batch is in %s", self.outcome.steps, what, path)
        if self.skipped_in_a_row > self.args.max_skipped_steps:
            raise RunFailed(
                f"{what} not finite at step {self.outcome.steps}, {self.skipped_in_a_row} steps in a row were skipped "
                f"(--max_skipped_steps {self.args.max_skipped_steps}): try a lower learning rate"
            )

    def publish(self) -> None:
        """Gives the current weights to whoever generates, once for each step."""
        if self.published != self.outcome.steps:
            self.parts.watchdog.progress("the weights' way to the engine")
            with self.timed("sync"):
                self.parts.rollouts.publish_weights()
            self.published = self.outcome.steps

    def evaluates_now(self, complete: bool) -> bool:
        if not self.args.eval_steps or self.parts.stop.reason:
            return False
        return complete or self.outcome.steps % self.args.eval_steps == 0

    def evaluate(self) -> None:
        """Evaluates the published weights on the held-out prompts."""
        parts, main = self.parts, self.parts.main
        assert parts.evaluator is not None
        parts.watchdog.progress("an evaluation")
        parts.recorder.phase("evaluating", parts.evaluator.num_completions)
        evaluation = parts.evaluator.run(
            parts.turns,
            main,
            self.args.reward_weights or [],
            self.outcome.steps,
            self.plan.total_steps,
            self.completions_done,
        )
        parts.recorder.phase_end()
        if evaluation is not None:
            parts.recorder.evaluation(self.outcome.steps, evaluation.metrics, evaluation.rows)
            self.outcome.saw_evaluation(evaluation.metrics)
            steps = self.outcome.steps
            saves = steps == self.plan.total_steps or steps % self.args.save_steps == 0
            if saves and steps and self.args.metric_for_best_model is not None:
                name = self.args.metric_for_best_model
                self.outcome.saw_checkpoint(evaluation.metrics, name, self.args.greater_is_better)
        self.take_seconds()

    def stop_asked(self) -> bool:
        """Whether any rank was told to stop, or time is up; all ranks learn it at the same step."""
        stop = self.parts.stop
        stop.reason = int(self.parts.ranks.max(stop.due()))
        return bool(stop.reason)

    def record(self, metrics: dict[str, float], round_: OpenRound, last: bool) -> None:
        own = self.take_seconds()
        parts = ("generate", "reward", "train", "sync")
        times = {f"time/{name}": round_.seconds.get(name, 0.0) + own.get(name, 0.0) for name in parts}
        seconds = sum(times.values())
        tokens = int(round_.batch.loss_mask.sum()) / self.plan.optimizer_steps_per_round
        times |= {"time/step": seconds, "tokens_per_second": tokens / seconds}
        metrics = metrics | times | self.parts.rollouts.take_metrics()
        self.parts.recorder.step(self.outcome.steps, metrics, last)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def take_seconds(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken
