"""How far the policy is from the one that sampled: what is logged of it, and completions that are left out for it."""

from __future__ import annotations

from torch import Tensor

from swift_r1.algorithms.aggregation import masked_metric, token_means
from swift_r1.algorithms.losses import LOG_RATIO_BOUND, k3


def kept_completions(logps: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """bool `[B, 1]`: not those with a negative advantage whose mean of `behaviour - logp` is above `delta`.

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556, eq. 9): what the policy has moved away from already is
    not pushed further.

    Args:
        logps, behaviour, advantages, mask: `[B, T]` each, finite; the mask is 1 on trained tokens.
    """
    drift = token_means(behaviour - logps.detach(), mask)
    return ((drift <= delta) | (token_means(advantages, mask) >= 0))[:, None]


def off_policy_metrics(logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums and counts of ms-swift's figures, from log-probs `[B, T]` of the trainer under the weights that sampled, and
    of the engine; over tokens, with `seq` or `ppl` in the name over completions. With r = exp(logp - rollout):

    - `rollout/kl` E[-log r] and `rollout/k3_kl` E[r - 1 - log r]: two estimates of KL(engine || trainer);
    - `rollout/chi2_token` E[r^2] - 1; `rollout/chi2_seq` the same of a completion's geometric mean of r;
    - `rollout/training_ppl`, `rollout/rollout_ppl`: perplexities; `rollout/log_ppl_diff` (and `_abs_`): the log of
      their ratio, `rollout/ppl_ratio` that ratio.
    """
    logps, bound = logps.detach(), LOG_RATIO_BOUND / 3
    log_ratio = (logps - rollout_logps).clamp(-bound, bound)
    tokens = {
        "kl": -log_ratio,
        "k3_kl": k3(rollout_logps, logps),
        "chi2_token": (2 * log_ratio).exp() - 1,
    }
    own, engines = token_means(logps, mask), token_means(rollout_logps, mask)
    difference = (engines - own).clamp(-bound, bound)
    completions = {
        "chi2_seq": (-2 * difference).exp() - 1,
        "training_ppl": (-own).clamp(max=bound).exp(),
        "rollout_ppl": (-engines).clamp(max=bound).exp(),
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": difference.exp(),
    }
    there = (mask.sum(1) > 0).to(mask.dtype)
    found = [masked_metric(f"rollout/{name}", values, mask) for name, values in tokens.items()]
    found += [masked_metric(f"rollout/{name}", values, there) for name, values in completions.items()]
    return {name: value for part in found for name, value in part.items()}
