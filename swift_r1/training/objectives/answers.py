"""Supervised training: -log p of the answers' tokens, the mean over all of a step's on all ranks: neither a row's length
nor how rows are cut into micro-batches weighs a token otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from swift_r1.algorithms.aggregation import masked_metric
from swift_r1.algorithms.chord import expert_loss
from swift_r1.algorithms.losses import LossOutput
from swift_r1.data.conversations import AnsweredTokens, Conversation
from swift_r1.models.policy import MicroBatch
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend
from swift_r1.training.batching import RoundBatch
from swift_r1.training.grpo import update
from swift_r1.training.objectives.base import counts_of


@dataclass(frozen=True)
class LearnedAnswers:
    """What `swift sft` learns."""

    backend: Backend
    ranks: Ranks
    answers_per_row = 1

    def answers(self, row: Conversation) -> Sequence[Sequence[AnsweredTokens]]:
        return [row.sequences]

    def step(
        self, batch: RoundBatch, micro_batches: Sequence[MicroBatch], learning_rate: float
    ) -> dict[str, float]:
        """Returns as `update`, with `token_accuracy`, `perplexity` and what `counts_of` gives."""
        counts = counts_of(micro_batches, self.ranks)
        losses = [partial(self._loss, micro, counts["tokens_learned"]) for micro in micro_batches]
        metrics = update(losses, self.backend, learning_rate, self.ranks)
        return metrics | {"perplexity": _perplexity(metrics["loss"])} | counts

    def evaluate(self, batch: RoundBatch, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Returns -log p, hits and number of the learned tokens."""
        found = torch.zeros(3, len(batch.owners), dtype=torch.float64)
        for micro in micro_batches:
            logps, hits = self._of_answers(micro)
            values = torch.stack([-logps, hits, torch.ones_like(hits)]).double()
            found[:, micro.samples] = (values * micro.trained).sum(2).cpu()
        return torch.stack([batch.of_completions(one) for one in self.ranks.sum_data(found)])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        nll, hits, tokens = sums.tolist()
        loss = nll / max(tokens, 1.0)
        return {
            "loss": loss,
            "perplexity": _perplexity(loss),
            "tokens_learned": tokens,
            "token_accuracy": hits / max(tokens, 1.0),
        }

    def _loss(self, micro: MicroBatch, tokens: float) -> LossOutput:
        logps, hits = self._of_answers(micro)
        result = expert_loss(logps, micro.trained, normalizer=tokens)
        return replace(result, metrics=masked_metric("token_accuracy", hits, micro.trained.float()))

    def _of_answers(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns the log-probs of the answers' tokens and 1 where a token is the likeliest one, float32 `[B, T]`."""
        found = self.backend.logprobs(micro.inputs._replace(top=1), 1.0)
        assert found.likeliest is not None
        hits = found.likeliest[:, 0] == found.likeliest[:, 1]
        return micro.unflatten(found.logps[:, 0]), micro.unflatten(hits.float())


def _perplexity(loss: float) -> float:
    return torch.tensor(loss, dtype=torch.float64).exp().item()
