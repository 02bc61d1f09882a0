"""Supervised training: answers that are learned, in the place of completions that are sampled (`swift sft`).

An optimizer step's loss is -log p of its learned tokens, the mean over all of them on all ranks: neither a row's length
nor how rows are cut into micro-batches weighs a token otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from swift_r1.algorithms.advantages import Advantages
from swift_r1.algorithms.aggregation import masked_metric
from swift_r1.algorithms.chord import expert_loss
from swift_r1.algorithms.losses import LossOutput
from swift_r1.data.conversations import Conversation
from swift_r1.models.policy import MicroBatch
from swift_r1.record.spans import Stopwatch
from swift_r1.rollout.prompts import MixedPrompts, Positions
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend
from swift_r1.training.batching import Batching, RoundBatch, everywhere, round_batch, split_step
from swift_r1.training.evaluation.evaluate import EvaluationLeft, Metrics, Rows
from swift_r1.training.grpo import update
from swift_r1.training.open_round import OpenRound


def batch_of(conversations: Sequence[Conversation]) -> RoundBatch:
    """Returns the rows of conversations, each a completion behind what stands before the first token that is learned."""
    rows = [row for one in conversations for row in _rows(one)]
    owners = [number for number, one in enumerate(conversations) for _ in one.sequences]
    return round_batch(rows, rewards=[0.0] * len(conversations), owners=owners)


def _rows(conversation: Conversation) -> list[TokenSequence]:
    return [
        TokenSequence(
            prompt_token_ids=one.token_ids[: one.begin],
            token_ids=one.token_ids[one.begin :],
            logprobs=(0.0,) * (len(one.token_ids) - one.begin),
            loss_mask=one.learned[one.begin :],
            images=conversation.images[: one.images],
        )
        for one in conversation.sequences
    ]


def alone(batching: Batching) -> Batching:
    """Returns how rows without groups and rewards are batched."""
    return replace(
        batching, group_size=1, share_from=None, silent_apart=False, images_anywhere=True
    )


@dataclass(frozen=True)
class AnsweredRounds:
    """Rounds of one optimizer step each. All methods are collective; `prompts` is on rank 0, None elsewhere."""

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
                batch = batch_of([one for one in taken if isinstance(one, Conversation)])
            batch = everywhere(batch, self.ranks)
            steps = [split_step(batch, range(len(batch)), self.batching, self.ranks)]
        advantages = Advantages(torch.ones(len(batch.owners)), torch.ones(len(batch)))
        return OpenRound(batch, steps, advantages, metrics={}, seconds={}, step=sft_step)


def sft_step(
    batches: Sequence[MicroBatch], backend: Backend, learning_rate: float, ranks: Ranks
) -> dict[str, float]:
    """Loss and update of an optimizer step. Collective.

    Returns:
        As `update`, with `token_accuracy`, `perplexity`, `tokens_learned`, this rank's `micro_batches` and the
        `tokens_computed` of all.
    """
    learned = torch.stack([micro.trained.sum() for micro in batches]).sum().cpu()
    computed = sum(micro.inputs.token_ids.numel() for micro in batches)
    counts = torch.tensor([learned.item(), computed], dtype=torch.float64)
    tokens, computed_by_all = ranks.sum_data(counts).tolist()
    losses = [partial(_loss, backend, micro, tokens) for micro in batches]
    metrics = update(losses, backend, learning_rate, ranks)
    return metrics | {
        "perplexity": _perplexity(metrics["loss"]),
        "tokens_learned": tokens,
        "micro_batches": float(len(batches)),
        "tokens_computed": computed_by_all,
    }


def _loss(backend: Backend, micro: MicroBatch, tokens: float) -> LossOutput:
    logps, hits = _of_answers(backend, micro)
    result = expert_loss(logps, micro.trained, normalizer=tokens)
    return replace(result, metrics=masked_metric("token_accuracy", hits, micro.trained.float()))


def _of_answers(backend: Backend, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Returns the log-probs of the answers' tokens and 1 where a token is the likeliest one, float32 `[B, T]`."""
    found = backend.logprobs(micro.inputs._replace(top=1), 1.0)
    assert found.likeliest is not None
    hits = found.likeliest[:, 0] == found.likeliest[:, 1]
    return micro.unflatten(found.logps[:, 0]), micro.unflatten(hits.float())


def _perplexity(loss: float) -> float:
    return torch.tensor(loss, dtype=torch.float64).exp().item()


@dataclass(frozen=True)
class AnswerEvaluator:
    """Measures the loss of held-out answers, each data set by itself."""

    conversations: Sequence[Conversation]  # on rank 0; empty elsewhere
    num_completions: int  # their number, on every rank
    at_once: int  # conversations that are sent to the ranks together
    backend: Backend
    batching: Batching
    ranks: Ranks

    @torch.no_grad()
    def run(self, step: int, unwanted: Callable[[], bool]) -> tuple[Metrics, Rows] | None:
        """Returns the metrics under `eval/<name>/` on rank 0: the mean over all learned tokens. Collective. Raises
        EvaluationLeft on all ranks soon after `unwanted` is True on one."""
        totals: dict[str, Tensor] = {}
        for start in range(0, self.num_completions, self.at_once):
            if self.ranks.max(float(unwanted())):
                raise EvaluationLeft
            part = self.conversations[start : start + self.at_once]
            sums = self._sums(everywhere(batch_of(part) if part else None, self.ranks))
            for number, one in enumerate(part):
                totals[one.dataset] = totals.get(one.dataset, 0) + sums[:, number]
        if not self.ranks.is_rank0:
            return None
        metrics: Metrics = {}
        for name, total in totals.items():
            nll, hits, count = total.tolist()
            loss = nll / max(count, 1.0)
            found = {"loss": loss, "perplexity": _perplexity(loss), "tokens_learned": count}
            found["token_accuracy"] = hits / max(count, 1.0)
            metrics |= {f"eval/{name}/{key}": value for key, value in found.items()}
        return metrics, []

    def _sums(self, batch: RoundBatch) -> Tensor:
        """Returns -log p, hits and number of the learned tokens of each conversation, float64 `[3, N]`."""
        found = torch.zeros(3, len(batch.owners), dtype=torch.float64)
        for micro in split_step(batch, range(len(batch)), self.batching, self.ranks):
            logps, hits = _of_answers(self.backend, micro)
            values = torch.stack([-logps, hits, torch.ones_like(hits)]).double()
            found[:, micro.samples] = (values * micro.trained).sum(2).cpu()
        return torch.stack([batch.of_completions(one) for one in self.ranks.sum_data(found)])
