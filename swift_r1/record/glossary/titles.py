"""What a chart of a metric is called, on the page of `swift view` and in a report."""

from __future__ import annotations

TITLES = {
    "reward": "Reward",
    "reward_std": "Spread of rewards",
    "frac_reward_zero_std": "Groups without signal",
    "completions/clipped_ratio": "Truncated completions",
    "completions/mean_length": "Completion length",
    "entropy": "Entropy of the policy",
    "policy/moved": "Policy change since the start",
    "kl": "KL to the reference",
    "kl/pull": "Pull of the KL",
    "teacher_kl": "KL to the teacher",
    "clip_ratio/low": "Clipped ratios: low",
    "clip_ratio/high": "Clipped ratios: high",
    "completions/repeated": "Equal completions",
    "rollout/logp_diff": "Trainer against engine",
    "grad_norm": "Gradient norm",
    "rollout/staleness/mean": "Staleness",
    "loss": "Loss",
    "token_accuracy": "Token accuracy",
    "perplexity": "Perplexity",
    "value_loss": "Value loss",
    "explained_variance": "Explained variance",
    "tokens_per_second": "Tokens per second",
}


def reward_title(name: str) -> str:
    """Returns the title of the mean of one reward function."""
    return f"Reward {name}"


def evaluation_title(benchmark: str) -> str:
    """Returns the title of what was measured on a benchmark."""
    return f"Evaluation: {benchmark}"
