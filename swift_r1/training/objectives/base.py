"""Rows with answers in the place of completions that are sampled: their rounds, their evaluation, and what an objective
that learns from them says of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from swift_r1.algorithms.advantages import Advantages
from swift_r1.data.conversations import AnsweredTokens, Conversation
from swift_r1.models.policy import MicroBatch
from swift_r1.record.spans import Stopwatch
from swift_r1.rollout.prompts import MixedPrompts, Positions
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.batching import Batching, RoundBatch, everywhere, round_batch, split_step
from swift_r1.training.evaluation.evaluate import EvaluationLeft, Metrics, Rows
from swift_r1.training.open_round import OpenRound


class Objective(Protocol):
    """Says what is learned from rows with answers. All methods but `answers` are collective."""

    @property
    def answers_per_row(self) -> int: ...

    def answers(self, row: Conversation) -> Sequence[Sequence[AnsweredTokens]]:
        """Returns the answers of a row that are learned from, each of one sequence or several."""
        ...

    def step(
        self, batch: RoundBatch, micro_batches: Sequence[MicroBatch], learning_rate: float
    ) -> dict[str, float]:
        """Takes an optimizer step on the answers of `batch`, of which these are this rank's. Returns its metrics, the
        same on every rank: `loss`, `grad_norm` and `learning_rate` at least."""
        ...

    def evaluate(self, batch: RoundBatch, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Returns what `metrics` is made of, of each row, float64 `[K, N]`."""
        ...

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Returns the metrics of rows together; `sums` `[K]` are those of what `evaluate` gave of each."""
        ...


def batch_of(objective: Objective, rows: Sequence[Conversation]) -> RoundBatch:
    """Returns the answers of rows, each a completion behind what stands before its first token that is learned."""
    answers = [(row, answer) for row in rows for answer in objective.answers(row)]
    sequences = [_sequence(row, one) for row, answer in answers for one in answer]
    owners = [number for number, (_, answer) in enumerate(answers) for _ in answer]
    return round_batch(sequences, rewards=[0.0] * len(answers), owners=owners)


def _sequence(row: Conversation, one: AnsweredTokens) -> TokenSequence:
    return TokenSequence(
        prompt_token_ids=one.token_ids[: one.begin],
        token_ids=one.token_ids[one.begin :],
        logprobs=(0.0,) * (len(one.token_ids) - one.begin),
        loss_mask=one.learned[one.begin :],
        images=row.images[: one.images],
    )


def counts_of(micro_batches: Sequence[MicroBatch], ranks: Ranks) -> dict[str, float]:
    """Returns `tokens_learned` and `tokens_computed` of all ranks, and this rank's `micro_batches`. Collective."""
    learned = torch.stack([micro.trained.sum() for micro in micro_batches]).sum().cpu()
    computed = sum(micro.inputs.token_ids.numel() for micro in micro_batches)
    counts = torch.tensor([learned.item(), computed], dtype=torch.float64)
    tokens, computed_by_all = ranks.sum_data(counts).tolist()
    return {
        "tokens_learned": tokens,
        "micro_batches": float(len(micro_batches)),
        "tokens_computed": computed_by_all,
    }


@dataclass(frozen=True)
class AnsweredRounds:
    """Rounds of one optimizer step each. All methods are collective; `prompts` is on rank 0, None elsewhere."""

    objective: Objective
    prompts: MixedPrompts | None
    size: int  # rows of a step
    batching: Batching
    ranks: Ranks
    stopwatch: Stopwatch

    def publish_weights(self, begun: int, in_the_middle: bool) -> None:
        """Nobody generates with them."""

    @property
    def positions(self) -> Positions:
        """How far the run is in the rows; on rank 0."""
        assert self.prompts is not None
        return self.prompts.positions

    def take(self, number: int) -> OpenRound:
        """Returns round `number`, whose answers are in the data. Raises RunFailed as `Prompts.take`."""
        with self.stopwatch.timed("train"), self.ranks.busy():
            batch = None
            if self.prompts is not None:
                taken = self.prompts.take([""] * self.size, number)
                rows = [one for one in taken if isinstance(one, Conversation)]
                batch = batch_of(self.objective, rows)
            batch = everywhere(batch, self.ranks)
            steps = [split_step(batch, range(len(batch)), self.batching, self.ranks)]
        advantages = Advantages(torch.ones(len(batch.owners)), torch.ones(len(batch)))
        step = partial(self.objective.step, batch)
        return OpenRound(batch, steps, advantages, metrics={}, seconds={}, step=step)


@dataclass(frozen=True)
class AnswerEvaluator:
    """Measures an objective on held-out rows, each data set by itself."""

    objective: Objective
    conversations: Sequence[Conversation]  # on rank 0; empty elsewhere
    num_completions: int  # their number, on every rank
    at_once: int  # conversations that are sent to the ranks together
    batching: Batching
    ranks: Ranks

    @torch.no_grad()
    def run(self, step: int, unwanted: Callable[[], bool]) -> tuple[Metrics, Rows] | None:
        """Returns the metrics under `eval/<name>/` on rank 0: the mean over what each counts. Collective. Raises
        EvaluationLeft on all ranks soon after `unwanted` is True on one."""
        totals: dict[str, Tensor] = {}
        for start in range(0, self.num_completions, self.at_once):
            if self.ranks.max(float(unwanted())):
                raise EvaluationLeft
            part = self.conversations[start : start + self.at_once]
            batch = everywhere(batch_of(self.objective, part) if part else None, self.ranks)
            micro_batches = split_step(batch, range(len(batch)), self.batching, self.ranks)
            measured = self.objective.evaluate(batch, micro_batches)
            for number, one in enumerate(part):
                totals[one.dataset] = totals.get(one.dataset, 0) + measured[:, number]
        if not self.ranks.is_rank0:
            return None
        metrics: Metrics = {}
        for name, total in totals.items():
            found = self.objective.metrics(total)
            metrics |= {f"eval/{name}/{key}": value for key, value in found.items()}
        return metrics, []


def of_answers(batching: Batching, per_row: int) -> Batching:
    """Returns how rows with so many answers each are batched: what the answers of a row begin with may be shared."""
    shared = None if per_row == 1 or batching.vision is not None else batching.share_from
    return replace(
        batching,
        completions=batching.completions * per_row,
        group_size=per_row,
        share_from=shared,
        silent_apart=False,
        images_anywhere=True,
    )
