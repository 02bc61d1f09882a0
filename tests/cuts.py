"""What an engine must sample from, and whether it does: one reference for both engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from swift_r1.wire.protocol import Completion, SamplingParams

# Each alone, in pairs and all together; where a cut changes the mass that the next one counts, the order shows.
CUTS = [
    {"top_k": 4},
    {"top_p": 0.6},
    {"top_k": 4, "top_p": 0.6},
    {"top_k": 9, "top_p": 0.9, "temperature": 1.5},
    {"min_p": 0.2, "top_p": 0.7, "temperature": 2.0},
    {"min_p": 0.05, "top_k": 6, "top_p": 0.8, "temperature": 1.3},
]


def distribution(logits: Sequence[float], sampling: SamplingParams) -> list[float]:
    """The probabilities after temperature, min-p, top-k and top-p: each cut renormalizes, as in vLLM."""
    probs = np.exp((np.array(logits) - max(logits)) / sampling.temperature)
    kept = [
        int(token) for token in np.argsort(-probs) if probs[token] >= sampling.min_p * probs.max()
    ]
    if sampling.top_k > 0:
        kept = kept[: sampling.top_k]
    mass, before, nucleus = sum(probs[kept]), 0.0, []
    for token in kept:
        if before < sampling.top_p * mass:
            nucleus.append(token)
        before += probs[token]
    return [
        float(probs[token] / sum(probs[nucleus])) if token in nucleus else 0.0
        for token in range(len(probs))
    ]


def check_first_tokens(
    completions: Sequence[Completion],
    logits: Sequence[float],
    sampling: SamplingParams,
    abs_error: float,
) -> None:
    """Each first token has a probability, which is the one reported; how often they came passes a chi-square test."""
    probs = distribution(logits, sampling)
    counts = [0] * len(probs)
    for one in completions:
        counts[one.token_ids[0]] += 1
        assert probs[one.token_ids[0]] > 0, "a token from outside of the cuts"
        assert one.logprobs[0] == pytest.approx(np.log(probs[one.token_ids[0]]), abs=abs_error)
    total = len(completions)
    common = [token for token, prob in enumerate(probs) if prob * total >= 5]
    assert len(common) > 1
    statistic = sum(
        (counts[token] - probs[token] * total) ** 2 / (probs[token] * total) for token in common
    )
    halves = torch.tensor([len(common) - 1, statistic], dtype=torch.float64) / 2
    assert torch.special.gammaincc(*halves) > 1e-4  # the chi-square distribution's upper tail
