"""From losses of tokens to the loss of an optimizer step: what is summed, and what it is divided by.

The denominator belongs to the whole optimizer step. Micro-batches and ranks each divide their own sum by the same
number, so the parts add up to the same loss however the step was split. So do metrics: they are sums and counts until
the parts are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from swift_r1.algorithms.config import LossConfig

SUM = "/sum"
COUNT = "/count"


def check_shapes(**tensors: Tensor | None) -> None:
    """Raises ValueError unless those given are of one shape `[B, T]`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
        raise ValueError(
            f"{', '.join(shapes)} must be of one shape [B, T], got {list(shapes.values())}"
        )


def token_means(per_token: Tensor, mask: Tensor) -> Tensor:
    """`[B]`: the mean over each row's trained tokens; 0 for a row without any.

    Args:
        per_token: `[B, T]`, finite where masked out too.
        mask: `[B, T]` in the dtype of `per_token`.
    """
    return (per_token * mask).sum(1) / mask.sum(1).clamp(min=1)


def counted(mask: Tensor, shares: Tensor | None) -> Tensor:
    """`[B]`: as how much of a completion each row counts in a metric of completions; one without trained tokens as
    nothing. Arguments as for `loss_normalizer`."""
    there = (mask.sum(1) > 0).to(mask.dtype)
    return there if shares is None else there * shares


def loss_numerator(
    per_token: Tensor, mask: Tensor, config: LossConfig, shares: Tensor | None = None
) -> Tensor:
    """Scalar: the sum that `loss_normalizer` divides. Arguments as for `token_means` and `loss_normalizer`."""
    if config.loss.mean_over == "completions":
        means = token_means(per_token, mask)
        return (means if shares is None else means * shares).sum()
    return (per_token * mask).sum()


def loss_normalizer(mask: Tensor, config: LossConfig, shares: Tensor | None = None) -> Tensor:
    """Returns what this part of an optimizer step adds to the step's denominator.

    Sum it over all micro-batches and all ranks before the first backward pass, and give the sum to `policy_loss`
    as `normalizer`. It is `N` for `grpo`, `sapo` and `real`, `N * max_completion_length` for `dr_grpo`, and the trained
    tokens for the others.

    A completion without trained tokens (`--overlong_filter`) still counts in `N`: the others keep their weight.

    Args:
        mask: `[B, T]`, 1 on trained tokens.
        shares: `[B]`, which part of its completion's tokens a row has, so that `N` counts completions; None: all.

    Returns:
        float64 scalar, exact up to 2**53.
    """
    completions = (
        torch.ones_like(mask[:, 0], dtype=torch.float64) if shares is None else shares.double()
    )
    if config.loss.mean_over == "completions":
        return completions.sum()
    if config.loss.mean_over == "length":
        return completions.sum() * config.max_completion_length
    return (mask != 0).sum().double()


def divide(numerator: Tensor, normalizer: Tensor | float) -> Tensor:
    """Scalar: `numerator / normalizer`, and 0 where the step has nothing to train (both are 0 then)."""
    # On the CPU it stays there: a device takes it along as a number, and waits for no copy.
    denominator = torch.as_tensor(normalizer, dtype=numerator.dtype)
    return numerator / torch.where(denominator == 0, 1.0, denominator)


def drop_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """`--overlong_filter`: the mask `[B, T]` without the tokens of completions that are `truncated` (bool `[B]`).

    DAPO, arXiv 2503.14476, section 3.4.
    """
    if truncated.shape != mask.shape[:1]:
        raise ValueError(f"truncated {tuple(truncated.shape)} must be [{mask.shape[0]}]")
    return mask.masked_fill(truncated.bool()[:, None], 0)


def masked_metric(name: str, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """`name/sum` and `name/count` (float64, 0-dim, no gradient) of `values`, each counted as `mask` says; shapes
    alike."""
    chosen = values.detach().to(mask.dtype).masked_fill(mask == 0, 0.0)
    return {
        name + SUM: (chosen * mask.detach()).sum(dtype=torch.float64),
        name + COUNT: mask.detach().sum(dtype=torch.float64),
    }


def sum_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Adds the metrics of several calls key by key. All parts of one loss have the same keys."""
    total: dict[str, Tensor] = {}
    for key, value in (item for part in parts for item in part.items()):
        total[key] = total[key] + value if key in total else value
    return total


def mean_metrics(summed: Mapping[str, Tensor]) -> dict[str, float]:
    """`name -> sum / count` for every name; one whose count is 0 is left out."""
    names = [key.removesuffix(SUM) for key in summed if key.endswith(SUM)]
    return {
        name: summed[name + SUM].item() / count
        for name in names
        if (count := summed[name + COUNT].item()) > 0
    }
