"""Flags of the algorithm: advantages and loss."""

from __future__ import annotations

from dataclasses import dataclass

from swift_r1.arguments.fields import flag


@dataclass(frozen=True, kw_only=True)
class AlgorithmArguments:
    """Algorithm."""

    rlhf_type: str = flag("grpo", "the algorithm; others are handed to ms-swift", choices=("grpo",), required=True)
    beta: float = flag(0.0, "weight of the KL penalty to the reference policy", at_least=0, ms_swift="0.04")
    epsilon: float = flag(0.2, "lower clip range of the importance ratio", at_least=0, less_than=1)
    epsilon_high: float | None = flag(None, "upper clip range (default: --epsilon; cispo: the cap, 5.0)", at_least=0)
    delta: float | None = flag(None, "upper bound of the ratio where the advantage is negative", more_than=1)
    loss_type: str = flag(
        "grpo", "the loss and what it divides by", choices=("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo")
    )
    scale_rewards: str = flag("group", "standard deviation to divide by", choices=("group", "batch", "none"))
    advantage_estimator: str = flag(
        "grpo", "how rewards become advantages", choices=("grpo", "rloo", "reinforce_plus_plus")
    )
    importance_sampling_level: str = flag("token", "level of the importance ratio", choices=("token", "sequence"))
    num_iterations: int = flag(1, "optimizer passes over a round of completions", at_least=1)
    steps_per_generation: int | None = flag(
        None, "micro-batches a rank generated at once (default: --gradient_accumulation_steps)", at_least=1
    )
    generation_batch_size: int | None = flag(
        None, "completions generated at once, over all ranks; instead of --steps_per_generation", at_least=2
    )
