"""Drawing tokens from logits: temperature, top-k, top-p, and one uniform number a token.

A completion's randomness is its own seed's stream of uniforms, so what it says does not depend on which
other completions share its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swift_r1.wire.protocol import SamplingParams


def uniform_streams(seeds: Sequence[int], length: int) -> Tensor:
    """`[B, length]` float32 uniforms in [0, 1); row b depends on `seeds[b]` alone."""
    rows = torch.empty(len(seeds), length)
    generator = torch.Generator()
    for row, seed in zip(rows, seeds, strict=True):
        generator.manual_seed(seed)
        row.uniform_(generator=generator)
    return rows


def sample(logits: Tensor, uniforms: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draws one token a row by inverting the cumulative distribution.

    Args:
        logits: `[B, V]`, any floating dtype.
        uniforms: `[B]` in [0, 1).
        sampling: temperature 0 takes the most likely token.

    Returns:
        `tokens [B]` int64 and `logprobs [B]` float32: natural logs under the distribution after temperature,
        top-k and top-p (greedy: at temperature 1), so that without top-k and top-p they are what the trainer
        computes.
    """
    logits = logits.float()
    if sampling.temperature == 0.0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        logits = _nucleus(logits, sampling.top_k, sampling.top_p)
    logprobs = logits.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    # Scaled by the last entry, which rounding leaves a little off 1.
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def _nucleus(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits outside the `top_k` largest, or outside the smallest set of mass `top_p`, become -inf."""
    ordered, order = logits.sort(-1, descending=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k > 0:
        drop[:, top_k:] = True
    if top_p < 1.0:
        probs = ordered.softmax(-1)
        drop |= probs.cumsum(-1) - probs >= top_p
    return logits.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
