"""Flags of the algorithm: advantages and loss."""

from __future__ import annotations

from dataclasses import dataclass

from swift_r1.arguments.fields import flag

DEFAULT_SCALE_REWARDS = {
    "grpo": "group",
    "rloo": "none",
    "reinforce_plus_plus": "batch",
    "reinforce_plus_plus_baseline": "batch",
}
"""`--advantage_estimator` to the `--scale_rewards` that its paper, and ms-swift, go with."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmArguments:
    """Algorithm."""

    rlhf_type: str = flag(
        "grpo", "the algorithm; others are handed to ms-swift", choices=("grpo", "ppo"), required=True
    )
    beta: float = flag(0.0, "weight of the KL penalty to the reference policy", at_least=0, ms_swift="0.04")
    epsilon: float = flag(
        0.2, "lower clip range of the importance ratio", at_least=0, less_than=1, aliases=("cliprange",)
    )
    epsilon_high: float | None = flag(None, "upper clip range (default: --epsilon; cispo: the cap, 5.0)", at_least=0)
    delta: float | None = flag(
        None, "upper bound of the ratio where the advantage is negative; above 1 + --epsilon_high", more_than=1
    )
    tau_pos: float = flag(1.0, "sapo: temperature where the advantage is positive", more_than=0)
    tau_neg: float = flag(1.05, "sapo: temperature where the advantage is negative", more_than=0)
    loss_type: str = flag(
        "grpo", "the loss and what it divides by", choices=("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo")
    )
    scale_rewards: str | None = flag(
        None,
        "standard deviation to divide by (default: group; rloo: none; reinforce_plus_plus: batch)",
        choices=("group", "batch", "none"),
        synonyms={"true": "group", "false": "none"},
        elsewhere={"gdpo": "--multi_objective_aggregation normalize_then_sum"},
    )
    advantage_estimator: str = flag(
        "grpo",
        "how rewards become advantages",
        choices=("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        ms_swift="grpo; its reinforce_plus_plus is reinforce_plus_plus_baseline here",
    )
    importance_sampling_level: str = flag(
        "token",
        "level of the importance ratio",
        choices=("token", "sequence"),
        elsewhere={"sequence_token": "sequence (one advantage a completion makes their gradients the same)"},
    )
    top_entropy_quantile: float = flag(
        1.0, "share of the tokens, those of highest entropy, that keep their policy loss", more_than=0, at_most=1
    )
    overlong_filter: bool = flag(False, "leave truncated completions out of the loss (their rewards still count)")
    kl_in_reward: bool = flag(
        False,
        "subtract --beta times the KL from the reward instead of adding it to the loss",
        ms_swift="true for rloo and reinforce_plus_plus",
    )
    rollout_importance_sampling_mode: str | None = flag(
        None,
        "correct for the gap between the engine's log-probs and the trainer's (default: not at all)",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    rollout_importance_sampling_threshold: float = flag(2.0, "largest weight of that correction", more_than=0)
    dynamic_sample: bool = flag(False, "replace groups whose rewards are all equal by those of further prompts")
    max_resample_times: int = flag(3, "how often a round may do that; what is left is trained on", at_least=1)
    sync_ref_model: bool = flag(False, "move the reference policy towards the policy now and then")
    ref_model_sync_steps: int = flag(512, "optimizer steps from one such move to the next", at_least=1)
    ref_model_mixup_alpha: float = flag(
        0.6, "weight of the policy in it: reference = alpha * policy + (1 - alpha) * reference", more_than=0, at_most=1
    )
    offload_ref_model: bool = flag(False, "keep the reference policy in host memory but while it computes (GPU only)")
    num_iterations: int = flag(
        1,
        "optimizer passes over a round of completions",
        at_least=1,
        aliases=("num_ppo_epochs",),
        ms_swift="4 for PPO",
    )
    steps_per_generation: int | None = flag(
        None, "micro-batches a rank generated at once (default: --gradient_accumulation_steps)", at_least=1
    )
    generation_batch_size: int | None = flag(
        None, "completions generated at once, over all ranks; instead of --steps_per_generation", at_least=2
    )
