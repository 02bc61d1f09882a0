"""Rewards less a baseline, in rows of which some entries are invalid."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def constant(rows: Tensor, valid: Tensor) -> Tensor:
    """Returns where the valid entries of a row are all equal (or there are fewer than two), bool `[R, 1]`."""
    if rows.shape[1] == 0:
        return valid.new_ones(rows.shape[0], 1)
    highest = rows.masked_fill(~valid, -math.inf).amax(1, keepdim=True)
    lowest = rows.masked_fill(~valid, math.inf).amin(1, keepdim=True)
    return highest <= lowest


def centre(rows: Tensor, valid: Tensor) -> Tensor:
    """Returns rows less their means over the valid entries; exactly 0 where invalid and in constant rows."""
    mean = rows.sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)
    # The mean of equal floats need not equal them, and the rest would be blown up by 1 / 1e-4.
    return (rows - mean).masked_fill(~valid | constant(rows, valid), 0.0)


def sample_deviation(rows: Tensor, valid: Tensor) -> Tensor:
    """Returns sample standard deviations (n - 1) over the valid entries, `[R, 1]`; 0 for fewer than two."""
    count = valid.sum(1, keepdim=True)
    return (centre(rows, valid).square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
