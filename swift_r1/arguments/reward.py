"""Flags of plugins and rewards."""

from __future__ import annotations

from dataclasses import dataclass

from swift_r1.arguments.fields import flag


@dataclass(frozen=True, kw_only=True)
class PluginArguments:
    """Plugins and rewards."""

    external_plugins: list[str] = flag([], "Python files that register rewards and datasets")
    reward_timeout: float = flag(
        10.0,
        "seconds that a reward call may take for each of its completions, before its process is killed",
        more_than=0,
    )
    reward_num_workers: int = flag(2, "processes that compute rewards", at_least=1)
    reward_isolation: str = flag(
        "process",
        "where rewards run: in processes that can be killed, or inline in the trainer (stateful or GPU rewards; "
        "no time-out, no memory limit)",
        choices=("process", "inline"),
    )
    reward_memory_limit: float = flag(
        2.0, "GiB that a reward process may take beside what loading the plugins took", more_than=0
    )
    reward_env: list[str] = flag(
        [], "environment variables that rewards may see although they look like secrets or proxies"
    )


@dataclass(frozen=True, kw_only=True)
class RewardArguments(PluginArguments):
    """Plugins and rewards."""

    reward_funcs: list[str] = flag(
        [], "names of reward functions; their weighted sum is the reward (needed, but for --use_gym_env true)"
    )
    reward_weights: list[float] | None = flag(None, "one weight a reward function (default: 1 each)")
    renormalize_reward_weights: bool = flag(
        False, "where a function returns None, let the other weights grow so that their sum stays"
    )
    multi_objective_aggregation: str = flag(
        "sum_then_normalize",
        "whether advantages are scaled after the rewards are summed, or each reward in its group before (GDPO)",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    truncated_reward: float | None = flag(None, "the reward of a truncated completion, whatever the functions say")
    missing_eos_penalty: float | None = flag(None, "subtracted from the reward of a truncated completion", more_than=0)
    reward_api: str | None = flag(
        None, "URL that the reward function `api` posts completions and columns to; token: SWIFT_REWARD_API_TOKEN"
    )
    max_invalid_reward_ratio: float = flag(
        0.2, "share of invalid rewards (exception, NaN, time-out) that stops the run", at_least=0, at_most=1
    )
