"""The coefficient of the entropy bonus: fixed, or raised while the policy's entropy is below a target.

The loss of a trained token has `-entropy_coef * H` in it, with H the entropy of the policy's distribution at that token
(PPO, arXiv 1707.06347, eq. 9). The adaptive coefficient is that of Skywork-OR1 (arXiv 2505.22312, section on adaptive
entropy control): the mean entropy of an optimizer step decides about the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyConfig:
    """Fields are the flags of the same names."""

    entropy_coef: float = 0.0  # the coefficient; with `use_adaptive_entropy` the first one
    use_adaptive_entropy: bool = False
    entropy_target: float = 0.2  # nats per token, on the mean
    entropy_coef_delta: float = 0.005  # change of the coefficient per optimizer step
    # bounds of the adaptive coefficient
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0


@dataclass(frozen=True, slots=True)
class EntropyState:
    """What the adaptive coefficient depends on; a checkpoint has it."""

    coef: float | None = None  # before the first step: None, the one that the flag gives
    entropy: float = math.inf  # mean of the last optimizer step, nats per token


def entropy_coef(state: EntropyState, config: EntropyConfig) -> float:
    """Returns what the coming step's entropy is multiplied by: c, or where adaptive c * [entropy <= target]."""
    if not config.use_adaptive_entropy:
        return config.entropy_coef
    coef = config.entropy_coef if state.coef is None else state.coef
    return coef if state.entropy <= config.entropy_target else 0.0


def after_step(state: EntropyState, entropy: float, config: EntropyConfig) -> EntropyState:
    """Returns the state after a step of this mean entropy: c + delta where it is at most the target, else c - delta,
    within `entropy_coef_min` and `entropy_coef_max`. An entropy that is not a number changes nothing."""
    if math.isnan(entropy):
        return state
    coef = config.entropy_coef if state.coef is None else state.coef
    change = config.entropy_coef_delta * (1 if entropy <= config.entropy_target else -1)
    bounded = min(max(coef + change, config.entropy_coef_min), config.entropy_coef_max)
    return EntropyState(bounded, entropy)
