"""RLOO (arXiv 2402.14740, eq. 7): a completion's baseline is the mean of the others of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift_r1.algorithms.groups import centre
from swift_r1.algorithms.method import Estimator

if TYPE_CHECKING:
    from torch import Tensor


def less_others(grouped: Tensor, valid: Tensor) -> Tensor:
    """r - mean of the others = (r - mean) * n / (n - 1), n the valid rewards of the group"""
    count = valid.sum(1, keepdim=True)
    return centre(grouped, valid) * count / (count - 1).clamp(min=1)


METHODS = (Estimator(name="rloo", centre=less_others, default_scale="none"),)
