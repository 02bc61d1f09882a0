r"""Pairs of answers to a prompt, of which one is preferred: DPO and its kin, CPO, SimPO, ORPO.

An optimizer step first takes the log-probs of its answers without a gradient. Their sums are known on every rank then,
and with them the loss and its gradient by each sum: the backward pass of a micro-batch needs no more than that.

    micro-batches ---- logprobs, no gradient ----> sums of the answers, of all ranks ----> loss, d loss / d sum
                  \                                                                              |
                   ---- logprobs, with gradient ----> sum of (d loss / d sum) x sum  <-----------
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swift_r1.algorithms.losses import LossOutput
from swift_r1.algorithms.preferences import AnswerSums, PairLoss, PreferenceConfig, compared
from swift_r1.data.conversations import AnsweredTokens, Conversation
from swift_r1.models.policy import MicroBatch
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend, ReferencePolicy
from swift_r1.training.batching import RoundBatch
from swift_r1.training.grpo import before_training, of_micro_batch, update
from swift_r1.training.objectives.base import counts_of


@dataclass(frozen=True)
class Preferences:
    """What `swift rlhf --rlhf_type dpo`, cpo, simpo and orpo learn."""

    config: PreferenceConfig
    backend: Backend
    reference: ReferencePolicy | None
    ranks: Ranks
    answers_per_row = 2

    def answers(self, row: Conversation) -> Sequence[Sequence[AnsweredTokens]]:
        return [row.sequences, row.rejected]

    def step(
        self, batch: RoundBatch, micro_batches: Sequence[MicroBatch], learning_rate: float
    ) -> dict[str, float]:
        """Returns as `update`, with what `_figures` and `counts_of` give."""
        weights = _token_weights(batch, self.config.ld_alpha)
        answers = self._measured(batch, micro_batches, weights)
        sums = [one.requires_grad_() for one in (answers.scores, answers.logps)]
        result = compared(answers, self.config)
        slopes = torch.autograd.grad(result.loss, sums, allow_unused=True)
        none = torch.zeros_like(answers.tokens)
        by_score, by_logp = (none if one is None else one for one in slopes)
        slope = by_score[batch.owners, None] * weights + by_logp[batch.owners, None]
        losses = [partial(self._loss, micro, slope) for micro in micro_batches]
        found = update(losses, self.backend, learning_rate, self.ranks)
        figures = _figures(answers, result)
        means = {name: value.mean().item() for name, value in figures.items()}
        terms = {f"loss/{name}": value.item() for name, value in result.terms.items()}
        loss = {"loss": result.loss.item()} | (terms if len(terms) > 1 else {})
        return found | loss | means | counts_of(micro_batches, self.ranks)

    def evaluate(self, batch: RoundBatch, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Returns the figures of each pair, the loss of each by itself, and 1."""
        answers = self._measured(batch, micro_batches, _token_weights(batch, self.config.ld_alpha))
        figures = _figures(answers, compared(answers, self.config))
        each = [
            compared(answers.part(slice(first, first + 2)), self.config).loss
            for first in range(0, len(answers.tokens), 2)
        ]
        return torch.stack([*figures.values(), torch.stack(each), torch.ones(len(each))])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        *values, count = sums.tolist()
        found = {
            name: value / count for name, value in zip((*FIGURES, "loss"), values, strict=True)
        }
        return found | {"pairs": count}

    def _measured(
        self, batch: RoundBatch, micro_batches: Sequence[MicroBatch], weights: Tensor
    ) -> AnswerSums:
        """Returns the answers under the policy as it is and under the reference, on every rank. Collective."""
        [known] = before_training(
            [micro_batches], self.backend, self.reference, 1.0, old_policy=True
        )
        found = torch.zeros(3, len(batch.owners), dtype=torch.float64)
        for micro in known:
            assert micro.old_logps is not None
            own = micro.old_logps.double().masked_fill(~micro.trained, 0.0)
            found[0, micro.samples] = (own * of_micro_batch(weights, micro)).sum(1).cpu()
            found[1, micro.samples] = own.sum(1).cpu()
            if micro.ref_logps is not None:
                reference = micro.ref_logps.double().masked_fill(~micro.trained, 0.0)
                found[2, micro.samples] = reference.sum(1).cpu()
        scores, logps, reference = map(batch.of_completions, self.ranks.sum_data(found))
        tokens = batch.of_completions(batch.token_mask().sum(1).double())
        return AnswerSums(scores, logps, reference, tokens)

    def _loss(self, micro: MicroBatch, slope: Tensor) -> LossOutput:
        logps = micro.unflatten(self.backend.logprobs(micro.inputs, 1.0).logps)
        own = of_micro_batch(slope, micro).to(logps.dtype)
        return LossOutput((own * logps.masked_fill(~micro.trained, 0.0)).sum(), {})


FIGURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""What is logged of pairs, by ms-swift's names."""


def _figures(answers: AnswerSums, result: PairLoss) -> dict[str, Tensor]:
    """Returns `FIGURES` of each pair."""
    apart = result.chosen - result.rejected
    logps = answers.logps.detach()
    values = (result.chosen, result.rejected, apart, (apart > 0).double(), logps[::2], logps[1::2])
    return dict(zip(FIGURES, values, strict=True))


def _token_weights(batch: RoundBatch, ld_alpha: float | None) -> Tensor:
    """Returns how much each token counts in its answer's score, float64 `[R, longest]`: `ld_alpha` behind the length of
    the shorter answer of the pair, else 1."""
    mask = batch.token_mask()
    if ld_alpha is None:
        return torch.ones(mask.shape, dtype=torch.float64)
    counts = mask.sum(1)
    of_answers = batch.of_completions(counts)
    before = counts.cumsum(0) - counts - (of_answers.cumsum(0) - of_answers)[batch.owners]
    places = mask.cumsum(1) - 1 + before[:, None]
    shorter = of_answers.view(-1, 2).min(1).values.repeat_interleave(2)[batch.owners]
    return torch.where(places < shorter[:, None], 1.0, ld_alpha).double()
