"""Metrics as sums and counts, so that adding them over micro-batches and ranks gives the exact mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

SUM, COUNT = "/sum", "/count"


def masked_metric(name: str, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """`name/sum` and `name/count` (float64, 0-dim, no gradient) of `values` where `mask` is not 0; shapes alike."""
    chosen = values.detach().to(mask.dtype).masked_fill(mask == 0, 0.0)
    return {name + SUM: chosen.sum(dtype=torch.float64), name + COUNT: mask.detach().sum(dtype=torch.float64)}


def sum_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Adds the metrics of several calls key by key. All parts of one loss have the same keys."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total[key] + value if key in total else value
    return total


def mean_metrics(summed: Mapping[str, Tensor]) -> dict[str, float]:
    """`name -> sum / count` for every name; one whose count is 0 is left out."""
    means: dict[str, float] = {}
    for key, value in summed.items():
        if key.endswith(SUM):
            name = key.removesuffix(SUM)
            count = summed[name + COUNT].item()
            if count > 0:
                means[name] = value.item() / count
    return means
