"""On-policy distillation: what a teacher says of the tokens that the student itself sampled.

Sources: GKD (Agarwal et al. 2024, arXiv 2306.13649, eq. 1 and 3 at lambda = 1), MiniLLM (Gu et al. 2024, 2306.08543,
eq. 1), "On-Policy Distillation" (Thinking Machines Lab, 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swift_r1.algorithms.method import Distillation

if TYPE_CHECKING:
    from torch import Tensor

LEAST_TAIL = 1e-5
"""A tail of less probability counts as this much: one less a sum of float32 probabilities is hardly known better."""


def reverse_kl(logps: Tensor, teacher_logps: Tensor) -> Tensor:
    """KL(student || teacher) = sum over v of p(v) * (log p(v) - log q(v)), with all tokens but the `K` given as one.

    Joining outcomes can only lower a KL: it is a lower bound of that over the vocabulary, and equal to it where the `K`
    are the whole vocabulary.

    Args:
        logps: `[*, K]`, log p of the teacher's likeliest tokens under the student; gets the gradient.
        teacher_logps: `[*, K]`, log q of the same tokens under the teacher, -inf where there are fewer than `K`.

    Returns:
        `[*]`, nats; at least float32. Without the rounding of the tail never negative.
    """
    import torch

    dtype = torch.promote_types(logps.dtype, torch.float32)
    known = teacher_logps.isfinite()
    log_q = teacher_logps.detach().to(dtype).masked_fill(~known, 0.0)
    log_p = logps.to(dtype).masked_fill(~known, 0.0)
    p = log_p.exp() * known
    tail_p, tail_q = (
        (1 - mass.sum(-1, dtype=torch.float64)).clamp(min=LEAST_TAIL)
        for mass in (p, log_q.exp() * known)
    )
    return (p * (log_p - log_q)).sum(-1) + (tail_p * (tail_p.log() - tail_q.log())).to(dtype)


def teacher_advantages(
    advantages: Tensor, old_logps: Tensor, teacher_logps: Tensor, mask: Tensor, coef: float
) -> Tensor:
    """A_t = A + coef * (log q(y_t) - log p(y_t)): each token's own estimate of the reverse KL, as its advantage.

    Only the token itself counts (a discount of 0), as in "On-Policy Distillation".

    Args:
        advantages: `[N]`, from the rewards.
        old_logps, teacher_logps: `[N, T]`, of the sampled tokens under the student that the round began with, log p,
            and under the teacher, log q.
        mask: bool `[N, T]`, True on tokens that the student wrote.

    Returns:
        `[N, T]`, without gradient, 0 where masked out; float64 for float64 advantages, else float32.
    """
    if not (
        old_logps.shape == teacher_logps.shape == mask.shape and advantages.shape == mask.shape[:1]
    ):
        shapes = [tuple(one.shape) for one in (advantages, old_logps, teacher_logps, mask)]
        raise ValueError(
            f"advantages, old_logps, teacher_logps, mask must be [N] and three times [N, T], got {shapes}"
        )
    import torch

    dtype = torch.promote_types(advantages.dtype, torch.float32)
    per_token = advantages.detach().to(dtype)[:, None] + coef * (
        teacher_logps - old_logps
    ).detach().to(dtype)
    return per_token.masked_fill(~mask, 0.0)


def advantages(
    of_completions: Tensor,
    old_logps: Tensor,
    teacher_logps: Tensor,
    mask: Tensor,
    flags: Any,
    step: int,
) -> tuple[Tensor, dict[str, float]]:
    """Returns `teacher_advantages` with the settings of a run."""
    return teacher_advantages(
        of_completions, old_logps, teacher_logps, mask, flags.teacher_kl_coef
    ), {}


def rewards(
    of_completions: Tensor, old_logps: Tensor, teacher_logps: Tensor, mask: Tensor, flags: Any
) -> Tensor:
    """Returns each reward less the KL to the teacher."""
    from swift_r1.algorithms.kl import rewards_less_kl

    return rewards_less_kl(of_completions, old_logps, teacher_logps, mask, flags.teacher_kl_coef)


METHODS = (
    Distillation(
        name="advantage",
        described="x {teacher_kl_coef:g} in each token's advantage",
        advantages=advantages,
    ),
    Distillation(
        name="reward",
        described="x {teacher_kl_coef:g} in the reward",
        flag="teacher_kl_in_reward",
        rewards=rewards,
    ),
    # `reverse_kl` needs the distribution at each token, which goes with the micro-batches.
    Distillation(
        name="loss",
        described="x {teacher_kl_coef:g} in the loss, over {gkd_logits_topk} tokens",
        flag="gkd_logits_topk",
    ),
)
