"""CHORD: experts' answers in every optimizer step, beside the policy's own completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from swift_r1.algorithms.chord import chord_mu, expert_loss
from swift_r1.algorithms.losses import LossOutput
from swift_r1.data.experts import ExpertAnswers
from swift_r1.flags import RunFlags
from swift_r1.models.policy import MicroBatch
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend
from swift_r1.training.batching import Batching, everywhere, round_batch, split_step


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """The experts' share in an optimizer step, and this rank's micro-batches of their answers."""

    mu: float
    batches: Sequence[MicroBatch] = ()
    tokens: float = 0.0  # of the answers on all ranks
    enable_phi: bool = False

    def losses(self, backend: Backend) -> list[Callable[[], LossOutput]]:
        """Returns a function for each micro-batch that gives mu times its loss."""
        return [partial(self._loss, backend, micro) for micro in self.batches]

    def _loss(self, backend: Backend, micro: MicroBatch) -> LossOutput:
        logps = micro.unflatten(backend.logprobs(micro.inputs, 1.0).logps)
        result = expert_loss(
            logps, micro.trained, enable_phi=self.enable_phi, normalizer=self.tokens
        )
        return replace(result, loss=self.mu * result.loss)


@dataclass(frozen=True, slots=True)
class Experts:
    """Takes answers of `--chord_sft_dataset` for every optimizer step. A step's answers depend on its number alone, so
    that a resumed run takes those that it would have taken."""

    args: RunFlags
    answers: ExpertAnswers | None  # on rank 0
    batching: Batching
    ranks: Ranks

    def step(self, done: int) -> ExpertStep:
        """Returns the experts' part of the optimizer step after `done` ones. Collective."""
        args = self.args
        ranks = self.ranks
        size = int(self.args.chord_sft_per_device_train_batch_size or 0)
        mu = chord_mu(
            done,
            int(args.chord_mu_warmup_steps or 0),
            int(args.chord_mu_decay_steps or 0),
            float(args.chord_mu_peak or 0.0),
            float(args.chord_mu_valley or 0.0),
        )
        if not mu:
            return ExpertStep(mu)
        count = size * args.gradient_accumulation_steps * args.batch_processes
        batch = None
        if self.answers is not None:
            rows = [
                TokenSequence.of_answer(*pair) for pair in self.answers.drawn(done * count, count)
            ]
            batch = round_batch(rows, rewards=[0.0] * count)
        batch = everywhere(batch, ranks)
        alone = replace(
            self.batching, completions=size, group_size=1, overlong_filter=False, silent_apart=False
        )
        tokens = float(batch.completion_lengths.sum())
        return ExpertStep(
            mu,
            split_step(batch, range(count), alone, ranks),
            tokens,
            args.chord_enable_phi_function,
        )
