"""REINFORCE++ and its variant with the group's mean as the baseline (arXiv 2501.03262)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift_r1.algorithms.groups import centre
from swift_r1.algorithms.method import Estimator

if TYPE_CHECKING:
    from torch import Tensor


def less_batch(grouped: Tensor, valid: Tensor) -> Tensor:
    """r - batch mean"""
    return centre(grouped.reshape(1, -1), valid.reshape(1, -1)).view_as(grouped)


METHODS = (
    Estimator(
        name="reinforce_plus_plus",
        centre=less_batch,
        baseline="batch",
        default_scale="batch",
        synonym="reinforce_plus_plus_batch",
        over_batch=True,
        note=(
            "--advantage_estimator reinforce_plus_plus has the batch's mean as its baseline, as in the paper; "
            "ms-swift's has the group's, which is reinforce_plus_plus_baseline here"
        ),
    ),
    Estimator(
        name="reinforce_plus_plus_baseline",
        centre=centre,
        default_scale="batch",
        synonym="reinforce_plus_plus_group",
        over_batch=True,
    ),
)
