"""How far the policy is from the one that sampled: what is logged of it, and completions that are left out for it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from swift_r1.algorithms.aggregation import counted, masked_metric, token_means
from swift_r1.algorithms.kl import k3
from swift_r1.algorithms.method import LOG_RATIO_BOUND


class WholeMeans(NamedTuple):
    """Means `[B]` over the trained tokens of the whole completion that a row is a part of, where that has several rows
    (an agent's episode). No gradient."""

    moved: Tensor  # of logp - old
    gap: Tensor  # of old - rollout
    drift: Tensor  # of rollout - logp
    advantage: Tensor
    old: Tensor
    rollout: Tensor


def kept_completions(
    logps: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    delta: float,
    whole: WholeMeans | None = None,
) -> Tensor:
    """bool `[B, 1]`: not those with a negative advantage whose mean of `behaviour - logp` is above `delta`.

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556, eq. 9): what the policy has moved away from already is
    not pushed further.

    Args:
        logps, behaviour, advantages, mask: `[B, T]` each, finite; the mask is 1 on trained tokens.
    """
    if whole is None:
        drift = token_means(behaviour - logps.detach(), mask)
        advantage = token_means(advantages, mask)
    else:
        drift = whole.drift
        advantage = whole.advantage
    return ((drift <= delta) | (advantage >= 0))[:, None]


def off_policy_metrics(
    logps: Tensor,
    rollout_logps: Tensor,
    mask: Tensor,
    shares: Tensor | None = None,
    whole: WholeMeans | None = None,
) -> dict[str, Tensor]:
    """Sums and counts of ms-swift's figures, from log-probs `[B, T]` of the trainer under the weights that sampled, and
    of the engine; over tokens, with `seq` or `ppl` in the name over completions. With r = exp(logp - rollout):

    - `rollout/kl` E[-log r] and `rollout/k3_kl` E[r - 1 - log r]: two estimates of KL(engine || trainer);
    - `rollout/chi2_token` E[r^2] - 1; `rollout/chi2_seq` the same of a completion's geometric mean of r;
    - `rollout/training_ppl`, `rollout/rollout_ppl`: perplexities; `rollout/log_ppl_diff` (and `_abs_`): the log of
      their ratio, `rollout/ppl_ratio` that ratio.
    """
    logps = logps.detach()
    bound = LOG_RATIO_BOUND / 3
    log_ratio = (logps - rollout_logps).clamp(-bound, bound)
    tokens = {
        "kl": -log_ratio,
        "k3_kl": k3(rollout_logps, logps),
        "chi2_token": (2 * log_ratio).exp() - 1,
    }
    own = token_means(logps, mask) if whole is None else whole.old
    engines = token_means(rollout_logps, mask) if whole is None else whole.rollout
    difference = (engines - own).clamp(-bound, bound)
    completions = {
        "chi2_seq": (-2 * difference).exp() - 1,
        "training_ppl": (-own).clamp(max=bound).exp(),
        "rollout_ppl": (-engines).clamp(max=bound).exp(),
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": difference.exp(),
    }
    there = counted(mask, shares)
    found = [masked_metric(f"rollout/{name}", values, mask) for name, values in tokens.items()]
    found += [
        masked_metric(f"rollout/{name}", values, there) for name, values in completions.items()
    ]
    return {name: value for part in found for name, value in part.items()}


def completion_weights(logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Tensor:
    """Returns what `weight_metrics` needs of each completion, float64 `[5, B]` without gradient. With w = exp(logp -
    rollout) of a trained token: their number, the sums of log w, w and w^2, and the largest log w.

    Args:
        logps, rollout_logps, mask: `[B, T]` each; the mask is not 0 on trained tokens.
    """
    trained = mask != 0
    log_w = (logps.detach() - rollout_logps).double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    w = log_w.exp().masked_fill(~trained, 0.0)
    none = -torch.inf
    sums = (
        trained.sum(1).double(),
        log_w.masked_fill(~trained, 0.0).sum(1),
        w.sum(1),
        w.square().sum(1),
    )
    return torch.stack([*sums, log_w.masked_fill(~trained, none).amax(1)])


def of_owners(found: Tensor, owners: Tensor) -> Tensor:
    """`completion_weights` of rows, `[5, R]`, as those of the completions that they are parts of, `[5, N]`."""
    count = int(owners.max()) + 1
    whole = found.new_zeros(5, count).index_add_(1, owners, found)
    whole[4] = found.new_full((count,), -torch.inf).scatter_reduce_(0, owners, found[4], "amax")
    return whole


def weight_metrics(found: Tensor) -> dict[str, float]:
    """Tells how far the policy of an optimizer step is from the one that sampled its completions, from
    `completion_weights` of all of them, `[5, N]`; those without trained tokens do not count:

    - `rollout/ratio_mean`, `rollout/ratio_max`: of the tokens' w;
    - `rollout/k3_kl_step`: the mean of w - 1 - log w, an estimate of KL(engine || policy);
    - `rollout/ess_token`, `rollout/ess_seq`: Kish's effective sample size (Survey Sampling, 1965), (sum w)^2 / sum w^2,
      as a share of the sample: of tokens, and of completions by the product of their tokens' w; 1 where all are equal.
    """
    tokens, log_w, w, squares, largest = found[:, found[0] > 0]
    if not len(tokens):
        return {}
    effective = 2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)
    return {
        "rollout/ratio_mean": (w.sum() / tokens.sum()).item(),
        "rollout/ratio_max": math.exp(largest.max().item()),
        "rollout/k3_kl_step": ((w.sum() - log_w.sum()) / tokens.sum() - 1).item(),
        "rollout/ess_token": (w.sum().square() / squares.sum() / tokens.sum()).item(),
        "rollout/ess_seq": effective.exp().item() / len(tokens),
    }
