"""One round's completions and rewards: prompts out of the data, through the engine and the reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from swift_r1.algorithms import groups_without_signal
from swift_r1.data.types import Prompt
from swift_r1.rewards.combine import Composition
from swift_r1.sampling.base import ignore_output
from swift_r1.sampling.scoring import ScoredRound, Scores, Scoring, loss_mask
from swift_r1.tracking.stopwatch import Stopwatch
from swift_r1.training.batch.batching import RoundBatch, round_batch
from swift_r1.training.context import Parts
from swift_r1.wire.protocol import RolloutRequest, completion_seed


class _Where(NamedTuple):
    """A round's number and the optimizer steps taken before it; both from 0."""

    number: int
    step: int


class Collector:
    """Rolls rounds out. All methods are collective."""

    def __init__(self, parts: Parts, stopwatch: Stopwatch) -> None:
        self.parts, self.args, self.plan, self.stopwatch = parts, parts.args, parts.plan, stopwatch

    def publish(self, begun: int, in_the_middle: bool) -> None:
        """Gives the weights to whoever generates; `begun` rounds were begun, the last of them may not be over."""
        self.parts.rollouts.publish_weights()

    @property
    def position(self) -> tuple[int, str]:
        """Prompts taken by the rounds that were rolled out, and their hash (`Prompts`); on the main rank."""
        assert self.parts.main is not None
        return self.parts.main.prompts.taken, self.parts.main.prompts.digest

    def close(self) -> None:
        """Ends what is under way."""

    def roll_out(self, number: int, step: int) -> tuple[RoundBatch, ScoredRound | None]:
        """Completions and rewards of round `number`, from 0, begun after `step` optimizer steps: the batch is the same
        on every rank, the rest on the main one.

        With `--dynamic_sample`, prompts whose group has no signal are replaced by the next prompts of the data, and
        those again, at most `--max_resample_times` times.
        """
        parts, size, where = self.parts, self.plan.num_generations, _Where(number, step)
        asked = self.plan.prompts_per_round
        first = self._sample(where, asked, 0)
        scored = ScoredRound(list(first.completions), [], [first], 0) if first else None
        if self.args.dynamic_sample:
            silent = self._without_signal(scored)
            for _ in range(self.args.max_resample_times):
                if not silent:
                    break
                fresh = self._sample(where, len(silent), asked)
                asked += len(silent)
                if scored and fresh:
                    scored.replace_groups(silent, fresh, size)
                silent = self._without_signal(scored)
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
        if self.args.async_generate and not self.args.max_staleness:
            scored.metrics |= dict.fromkeys(("rollout/staleness/mean", "rollout/staleness/max"), 0.0)
        if parts.ranks.world_size > 1:
            parts.ranks.broadcast(batch.tensors())
        return batch, scored

    def _sample(self, where: _Where, count: int, first: int) -> Scores | None:
        """Completions of the next `count` prompts and their rewards, on the main rank.

        Rewards are computed while other completions are still generated; `time/reward` is what is left of that.
        `first` is how many prompts this round has asked for already.
        """
        parts, main, recorder = self.parts, self.parts.main, self.parts.recorder
        with parts.ranks.busy():  # streamed ones may come from far away
            prompts = main.prompts.take(count) if main else []
        requests = [
            RolloutRequest(
                request_id=f"{parts.run_id}/{where.number}/{position}",
                prompt_token_ids=prompt.token_ids,
                n=self.plan.num_generations,
                seeds=tuple(
                    completion_seed(self.args.seed, where.number, position, prompt.prompt_id, index)
                    for index in range(self.plan.num_generations)
                ),
                sampling=parts.sampling,
            )
            for position, prompt in enumerate(prompts, start=first)
        ]
        scoring = self._scoring(where, prompts, requests, first) if main else None
        recorder.phase("generating", count * self.plan.num_generations)
        parts.watchdog.progress("generation")
        with self.stopwatch.timed("generate"):
            parts.turns.generate(
                prompts,
                requests if main else None,
                parts.completions_done,
                scoring.add if scoring else ignore_output,
            )
        recorder.phase_end()
        if scoring is None:
            return None
        parts.watchdog.progress("the rewards")
        with self.stopwatch.timed("reward"), parts.ranks.busy():
            return scoring.result()

    def _scoring(
        self, where: _Where, prompts: Sequence[Prompt], requests: Sequence[RolloutRequest], first: int
    ) -> Scoring:
        """Takes completions of these prompts as they come, and has their rewards at the end."""
        main = self.parts.main
        assert main is not None
        return Scoring(
            prompts,
            [request.request_id for request in requests],
            main.decode,
            main.open_rewards,
            Composition.from_flags(self.args),
            {"global_step": where.step, "max_steps": self.plan.total_steps},
            first_group=first,
        )

    def _without_signal(self, scored: ScoredRound | None) -> list[int]:
        """Which of the round's groups teach nothing, by place; every rank learns it, so that all go on alike."""
        found = None
        if scored is not None:
            rewards = torch.tensor([item.objective for item in scored.trained])
            silent = groups_without_signal(rewards, self.plan.num_generations)
            found = [silent.nonzero().flatten()]
            scored.without_signal = int(silent.sum())
        return self.parts.ranks.broadcast(found)[0].tolist()
