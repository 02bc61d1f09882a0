"""RLSD (arXiv 2604.03128): the reward says in which direction, and a teacher which tokens count more.

The teacher is told more than the policy; what counts is its log-probs of the policy's own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_r1.algorithms.method import Distillation, setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RlsdSettings:
    """The flags of RLSD."""

    rlsd_lambda: float = setting(0.5, "its share: 0 the plain advantage", at_least=0, at_most=1)
    rlsd_reweight_clip_range: float = setting(
        0.2, "how far a token's factor may be from 1", at_least=0
    )
    rlsd_lambda_warmup_steps: int = setting(
        0, "optimizer steps until --rlsd_lambda is reached", at_least=0
    )
    rlsd_lambda_decay_steps: int = setting(0, "steps from there to 0; 0: it stays", at_least=0)
    rlsd_negative_only: bool = setting(False, "positive advantages stay as they are")


def rlsd_advantages(
    advantages: Tensor,
    old_logps: Tensor,
    teacher_logps: Tensor,
    mask: Tensor,
    *,
    strength: float,
    clip_range: float,
    negative_only: bool = False,
) -> Tensor:
    """A * ((1 - strength) + strength * clip(exp(sign(A) * (teacher - old)), 1 - clip_range, 1 + clip_range))

    Args:
        advantages: `[B]`, of completions.
        old_logps, teacher_logps: `[B, T]`, of the policy that sampled and of the teacher.
        mask: `[B, T]`, not 0 on trained tokens.
        strength: lambda, from 0 (the plain advantage) to 1, see `rlsd_strength`.
        negative_only: positive advantages stay as they are.

    Returns:
        `[B, T]`, without gradient, 0 where not trained.
    """
    trained = mask != 0
    base = advantages.detach()[:, None]
    gap = (teacher_logps - old_logps).detach().masked_fill(~trained, 0.0)
    # Clipped before `exp` too, so that none overflows where the clip decides anyway.
    weights = (base.sign() * gap).clamp(-20.0, 20.0).exp().clamp(1 - clip_range, 1 + clip_range)
    reweighted = base * (1 - strength + strength * weights)
    if negative_only:
        reweighted = reweighted.where(base < 0, base)
    return reweighted.masked_fill(~trained, 0.0)


def rlsd_strength(step: int, peak: float, warmup_steps: int, decay_steps: int) -> float:
    """`peak`, reached in a line over `warmup_steps`, then left in one over `decay_steps` (0: it stays); `step` counts
    the optimizer steps done."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    return peak * max(1 - (step - warmup_steps) / decay_steps, 0.0) if decay_steps else peak


def advantages(
    of_completions: Tensor,
    old_logps: Tensor,
    teacher_logps: Tensor,
    mask: Tensor,
    flags: RlsdSettings,
    step: int,
) -> tuple[Tensor, dict[str, float]]:
    """Returns `rlsd_advantages` of a round that began after `step` optimizer steps, and its strength."""
    strength = rlsd_strength(
        step, flags.rlsd_lambda, flags.rlsd_lambda_warmup_steps, flags.rlsd_lambda_decay_steps
    )
    reweighted = rlsd_advantages(
        of_completions,
        old_logps,
        teacher_logps,
        mask,
        strength=strength,
        clip_range=flags.rlsd_reweight_clip_range,
        negative_only=flags.rlsd_negative_only,
    )
    return reweighted, {"rlsd_lambda": strength}


METHODS = (
    Distillation(
        name="rlsd",
        described="RLSD x {rlsd_lambda:g}",
        flag="advantage_reweight",
        value="rlsd",
        by_itself=True,
        advantages=advantages,
        needs_rewards=True,
        settings=RlsdSettings,
        metrics=(
            ("rlsd_lambda", "how much the teacher weighs tokens", "", "as `--rlsd_lambda` says"),
        ),
    ),
)
