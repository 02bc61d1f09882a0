"""Flags of PPO, and what `--rlhf_type` makes of the flags of the other method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_r1.arguments.fields import flag
from swift_r1.arguments.parser import Fault

if TYPE_CHECKING:
    from swift_r1.arguments.rlhf import RlhfArguments

PPO_ONLY = (
    *("critic_model", "critic_learning_rate", "critic_warmup_steps", "num_mini_batches", "kl_coef", "gamma", "lam"),
    *("cliprange_value", "vf_coef", "whiten_rewards", "whiten_advantages"),
)
_GRPO_ONLY = {
    "beta": "the KL is in the reward: --kl_coef",
    "kl_in_reward": "the KL is always in the reward: --kl_coef",
    "advantage_estimator": "advantages come from the critic",
    "scale_rewards": "rewards are not compared in groups; --whiten_rewards and --whiten_advantages scale",
    "multi_objective_aggregation": "rewards are not compared in groups",
    "dynamic_sample": "a group of equal rewards teaches the critic too",
    "max_resample_times": "a group of equal rewards teaches the critic too",
    "loss_type": "it has one loss, the mean over tokens",
    "tau_pos": "it has one loss, the mean over tokens",
    "tau_neg": "it has one loss, the mean over tokens",
    "importance_sampling_level": "advantages, and so ratios, are of tokens",
}
"""Flags that PPO has no use for, and why."""


@dataclass(frozen=True, kw_only=True)
class PPOArguments:
    """PPO."""

    critic_model: str | None = flag(
        None, "folder or id of the critic: a language model, or the critic/ of a checkpoint (default: --model)"
    )
    critic_learning_rate: float | None = flag(
        None, "peak learning rate of the critic (default: --learning_rate)", at_least=0
    )
    critic_warmup_steps: int = flag(0, "optimizer steps at the start in which only the critic learns", at_least=0)
    num_mini_batches: int | None = flag(
        None,
        "optimizer steps in one pass over a round, each of --gradient_accumulation_steps micro-batches; instead of "
        "--steps_per_generation",
        at_least=1,
        ms_swift="1",
    )
    kl_coef: float = flag(
        0.0, "weight of the KL to the reference policy in each token's reward", at_least=0, ms_swift="0.05"
    )
    gamma: float = flag(1.0, "discount of later rewards", at_least=0, at_most=1)
    lam: float = flag(
        0.95, "lambda of GAE: 0 trusts the critic at the next token, 1 only the whole return", at_least=0, at_most=1
    )
    cliprange_value: float = flag(
        0.2, "how far a value may move from what it was before the round; 0: without limit", at_least=0
    )
    vf_coef: float = flag(
        0.1, "weight of the value loss: the critic's gradient is multiplied by it, then clipped", more_than=0
    )
    whiten_rewards: bool = flag(False, "divide the rewards of all tokens of a round by their standard deviation")
    whiten_advantages: bool = flag(True, "give the advantages of all tokens of a round mean 0 and standard deviation 1")


def algorithm_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Flags of the other method, and what PPO needs."""
    if args.rlhf_type == "grpo":
        for name in PPO_ONLY:
            if name in given:
                yield Fault(f"--{name} has no effect with --rlhf_type grpo: it is PPO's", ("rlhf_type", name))
        if args.num_generations < 2:
            yield Fault(
                "--num_generations must be at least 2, not 1, with --rlhf_type grpo: a completion is compared with its "
                "group",
                ("num_generations",),
            )
        return
    if args.rlhf_type != "ppo":
        return
    for name, why in _GRPO_ONLY.items():
        if name in given:
            yield Fault(f"--{name} has no effect with --rlhf_type ppo: {why}", ("rlhf_type", name))
    if 0 < args.max_steps <= args.critic_warmup_steps:
        yield Fault(
            f"--critic_warmup_steps {args.critic_warmup_steps} leaves the policy no step of --max_steps "
            f"{args.max_steps}",
            ("critic_warmup_steps", "max_steps"),
        )
    other = [name for name in ("steps_per_generation", "generation_batch_size") if name in given]
    if args.num_mini_batches is not None and other:
        yield Fault(f"give either --num_mini_batches or --{other[0]}, not both", ("num_mini_batches", *other))
