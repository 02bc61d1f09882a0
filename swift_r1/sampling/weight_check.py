"""Whether the engine uses the weights that it was sent: its log-probs of fixed tokens against the trainer's own.

Hashes prove that bytes arrived. They say nothing of what the engine does with them afterwards: repacked copies, tied
heads and quantised layers can stay at an old version without an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swift_r1.models.policy import ModelInputs
from swift_r1.sampling.base import TrainedPolicy

_SEQUENCES, _LENGTH = 4, 48
_STEP = 7919  # a prime: the tokens are spread over the vocabulary and do not repeat soon

TOLERANCE, TOLERANCE_16_BIT = 0.01, 0.2
"""Largest mean difference (nats) between two engines' log-probs that rounding explains. In bf16 SmolLM2 differs by
0.075 from itself in float32 on these tokens; an output head that stayed behind by a few updates made it 0.25."""


def probe_sequences(vocab_size: int) -> list[tuple[int, ...]]:
    """The fixed prompts as token ids: any tokens do, since both sides read the same ones."""
    tokens = [number * _STEP % vocab_size for number in range(1, 1 + _SEQUENCES * _LENGTH)]
    return [tuple(tokens[start : start + _LENGTH]) for start in range(0, len(tokens), _LENGTH)]


@torch.no_grad()
def own_logprobs(backend: TrainedPolicy, sequences: Sequence[Sequence[int]], device: torch.device) -> list[list[float]]:
    """The policy's log-probs of each sequence's tokens after the first, at temperature 1. Collective."""
    token_ids = torch.tensor(sequences, device=device)
    rows, length = token_ids.shape
    positions = torch.arange(rows * length, device=device).view(rows, length)[:, :-1].flatten()
    inputs = ModelInputs(token_ids, positions, token_ids[:, 1:].flatten())
    return backend.logprobs(inputs, 1.0).logps.float().view(rows, length - 1).tolist()


def mean_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference of two lists of log-probs of the same tokens, in nats."""
    differences = [abs(a - b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return sum(differences) / len(differences)


def tolerance(*dtypes: str) -> float:
    """For the dtypes of trainer and engine (`float32`, `bfloat16`, `float16`)."""
    return TOLERANCE if set(dtypes) == {"float32"} else TOLERANCE_16_BIT
