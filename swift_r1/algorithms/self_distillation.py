"""Learning from a teacher that is told more than the policy, from its log-probs of the policy's own tokens."""

from __future__ import annotations

from torch import Tensor


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

    RLSD (arXiv 2604.03128), `--advantage_reweight rlsd`: the reward says in which direction, the teacher which tokens
    count more.

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


def sdar(logps: Tensor, teacher_logps: Tensor, gate_beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """stopgrad(g) * (teacher - logp), g = sigmoid(gate_beta * (teacher - logp)): tokens of which the teacher is surer
    are learned from it.

    SDAR (arXiv 2605.15155), `--sdar_loss_coef`. All `[B, T]`; the gradient goes to `logps` alone. Also what to log:
    `sdar/gate_mean`, `sdar/gate_active_ratio` (g above 1/2) and `sdar/teacher_gap_mean`.
    """
    gap = teacher_logps.detach() - logps
    gate = (gate_beta * gap.detach()).sigmoid()
    logged = {"sdar/gate_mean": gate, "sdar/gate_active_ratio": gate > 0.5, "sdar/teacher_gap_mean": gap.detach()}
    return gate * gap, logged
