"""Flags of plugins and rewards."""

from __future__ import annotations

from dataclasses import dataclass

from swift_r1.arguments.fields import flag


@dataclass(frozen=True, kw_only=True)
class RewardArguments:
    """Plugins and rewards."""

    external_plugins: list[str] = flag([], "Python files that register rewards and datasets")
    reward_funcs: list[str] = flag([], "names of reward functions; their weighted sum is the reward", required=True)
    reward_weights: list[float] | None = flag(None, "one weight a reward function (default: 1 each)")
    reward_timeout: float = flag(10.0, "seconds a reward call may take before its process is killed", more_than=0)
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
    max_invalid_reward_ratio: float = flag(
        0.2, "share of invalid rewards (exception, NaN, time-out) that stops the run", at_least=0, at_most=1
    )
