"""The work of a round, completions and their lengths; and how much of a chip's figures is reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

QUANTILES = 64  # points that a distribution of lengths is followed at


@dataclass(frozen=True, slots=True)
class Round:
    """The work of one round.

    Attributes:
        prompts, group: completions = prompts x group.
        prompt_tokens, completion_tokens: on average.
        longest: tokens at which a completion is cut off.
        updates: optimizer steps, over all iterations.
        iterations: how often each completion is trained on.
        shares_prompts: a group's prompt is computed once in training too.
        recorded: ascending quantiles of recorded lengths, where there are any.
        patches: of a prompt's images, what their tower takes as one position each.
        tower_passes: of the tower in training, in forward passes: 3 where it is trained too.
    """

    prompts: int
    group: int
    prompt_tokens: float
    completion_tokens: float
    longest: int
    updates: int = 1
    iterations: int = 1
    shares_prompts: bool = False
    recorded: tuple[float, ...] = ()
    patches: float = 0.0
    tower_passes: int = 1

    @property
    def completions(self) -> int:
        return self.prompts * self.group

    @property
    def generated_tokens(self) -> float:
        return self.completions * self.completion_tokens

    @property
    def lengths(self) -> tuple[float, ...]:
        """Returns the ascending quantiles of the lengths of completions: the recorded ones, stretched to the mean, or
        assumed."""
        if not self.recorded:
            return lengths(self.completion_tokens, self.longest)
        stretch = self.completion_tokens * len(self.recorded) / sum(self.recorded)
        return tuple(min(self.longest, one * stretch) for one in self.recorded)

    @property
    def trained_tokens(self) -> float:
        """Returns the tokens of one forward pass over all completions, with their prompts."""
        return self.generated_tokens + self.prompt_tokens * (
            self.prompts if self.shares_prompts else self.completions
        )


def lengths(mean: float, longest: float, points: int = QUANTILES) -> tuple[float, ...]:
    """Returns the ascending quantiles of an exponential distribution that is cut off at `longest` and has this mean.

    P(length > x) = exp(-rate x) up to the cut: completions end with the same probability at each token. A mean of more
    than half the longest comes of completions most of which are cut off.
    """
    rate = _rate(mean, longest)
    found = []
    for index in range(points):
        share = (index + 0.5) / points
        found.append(
            longest if rate * longest < 1e-9 else min(longest, -math.log(1.0 - share) / rate)
        )
    scale = mean * points / sum(found)
    return tuple(min(longest, one * scale) for one in found)


def _rate(mean: float, longest: float) -> float:
    """Solves (1 - exp(-rate longest)) / rate = mean by bisection."""
    if mean >= longest * (1 - 1e-6):
        return 0.0
    low = 0.0
    high = 1.0 / mean
    for _ in range(60):
        rate = (low + high) / 2
        if (1.0 - math.exp(-rate * longest)) / rate > mean:
            low = rate
        else:
            high = rate
    return high


def alive(quantiles: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """(tokens, share of completions that are still running) for each stretch between two ends."""
    found = list[tuple[float, float]]()
    before = 0.0
    count = len(quantiles)
    for index, end in enumerate(quantiles):
        if end > before:
            found.append((end - before, (count - index) / count))
            before = end
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a chip's figures that are reached, and what else a phase takes. All of these are assumptions, unless
    they are calibrated (`measured.py`).

    Attributes:
        train: share of FLOP/s in forward and backward passes of training.
        forward: the same in passes without gradients: prefill, log-probs.
        decode: the same in a decoding step whose batch is so large that arithmetic is the limit.
        sparse: share of these three that layers with experts reach: small matrices, and tokens sent to and fro.
        memory: share of the memory's bandwidth in decoding.
        layer_seconds: of a decoding step, per layer: starting kernels, and what does not grow with the batch.
        token_seconds: of the host, for each token that an engine hands over with its log-prob.
        products, streams: shares of FLOP/s that matrix products reach by themselves, and of the bandwidth that kernels
            reach that only read and write: less than `train` leaves nothing of a step out.
        launch_seconds: of the host, for each kernel of a training step; 0 where there are none.
        link_seconds: of one exchange between the devices of a tensor-parallel layer.
        network: share of the links' figures.
        exposed: share of the exchanges of training that computing does not hide.
        gather_seconds: latency of an exchange of ZeRO-3, of which there are three per layer and micro-batch.
        shm, http: bytes/s of a push: through shared memory; compared, hashed and sent by HTTP.
        load: bytes/s of a push into an engine, per device; also from memory of a GPU that both see.
        push_seconds: of a push in addition.
        changed: share of the weights' bytes that a push of changes sends.
        reward_seconds: per completion.
        step_seconds: of each optimizer step in addition.
        generate_factor, train_factor, push_factor: measured seconds over these formulas'; 1 if nothing was measured.
    """

    train: float = 0.35
    forward: float = 0.45
    decode: float = 0.5
    sparse: float = 0.35
    memory: float = 0.6
    layer_seconds: float = 5e-5
    token_seconds: float = 4e-5
    products: float = 0.75
    streams: float = 0.75
    launch_seconds: float = 3.5e-5
    link_seconds: float = 2e-5
    network: float = 0.7
    exposed: float = 0.3
    gather_seconds: float = 1e-4
    shm: float = 1.1e9
    http: float = 1.5e9
    load: float = 10e9
    push_seconds: float = 0.04
    changed: float = 0.006
    reward_seconds: float = 0.0
    step_seconds: float = 0.0
    generate_factor: float = 1.0
    train_factor: float = 1.0
    push_factor: float = 1.0


GPU = Efficiency()
CPU = Efficiency(
    train=0.45,
    forward=0.5,
    decode=0.4,
    memory=0.6,
    layer_seconds=4e-4,
    token_seconds=0.0,
    launch_seconds=0.0,
    network=0.5,
    shm=2.4e9,
    http=0.8e9,
    load=1.4e9,
    push_seconds=0.0,
    step_seconds=0.05,
)
"""Assumed for one process on some cores (docs/performance.md has what was measured: 0.54 of the arithmetic)."""
