"""SDAR (arXiv 2605.15155): a loss that draws the policy to a teacher, which is told more, where that one is surer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_r1.algorithms.method import Distillation, setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SdarSettings:
    """The flags of SDAR."""

    sdar_loss_coef: float = setting(
        0.0,
        "weight of a loss that draws the policy to the teacher (by default itself, reading the same column) on tokens "
        "of which the teacher is surer",
        at_least=0,
        instead_of=(
            "teacher_kl_in_reward",
            "gkd_logits_topk",
            "teacher_kl_coef",
            "advantage_reweight",
        ),
    )
    sdar_gate_beta: float = setting(
        5.0, "how sharply it tells these tokens from others", more_than=0
    )


def sdar(
    logps: Tensor, teacher_logps: Tensor, gate_beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """stopgrad(g) * (teacher - logp), g = sigmoid(gate_beta * (teacher - logp)): tokens of which the teacher is surer
    are learned from it.

    All are `[B, T]`; the gradient goes to `logps` alone. Also what to log:
    `sdar/gate_mean`, `sdar/gate_active_ratio` (g above 1/2) and `sdar/teacher_gap_mean`.
    """
    gap = teacher_logps.detach() - logps
    gate = (gate_beta * gap.detach()).sigmoid()
    logged = {
        "sdar/gate_mean": gate,
        "sdar/gate_active_ratio": gate > 0.5,
        "sdar/teacher_gap_mean": gap.detach(),
    }
    return gate * gap, logged


def token_loss(
    logps: Tensor, teacher_logps: Tensor, config: SdarSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns `sdar` with the settings of a run."""
    return sdar(logps, teacher_logps, config.sdar_gate_beta)


METHODS = (
    Distillation(
        name="sdar",
        described="SDAR x {sdar_loss_coef:g}",
        flag="sdar_loss_coef",
        by_itself=True,
        token_loss=token_loss,
        settings=SdarSettings,
        metrics=(
            ("sdar/gate_mean", "gate of a token by the teacher's lead, mean", "", "0.5: no lead"),
            ("sdar/gate_active_ratio", "tokens with a gate above 1/2", "share", ""),
            (
                "sdar/teacher_gap_mean",
                "the teacher's log-prob less the policy's, mean",
                "nats",
                "falls to 0",
            ),
        ),
    ),
)
