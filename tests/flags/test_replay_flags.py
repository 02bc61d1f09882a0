"""`swift replay`: what its flags are where they are not given."""

from __future__ import annotations

from swift_r1.cli.replay import ReplayArguments, recorded_flags
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import RlhfArguments

PPO = [
    "--rlhf_type",
    "ppo",
    "--model",
    "m",
    "--dataset",
    "a.jsonl",
    "--reward_funcs",
    "format",
    "--use_vllm",
    "false",
]


def replayed(run: list[str], *words: str) -> ReplayArguments:
    args = parse_arguments(RlhfArguments, [*PPO, *run], {})
    recorded = recorded_flags(args.to_dict(), args.generation_batch_size or 0)
    return parse_arguments(ReplayArguments, words, {}, recorded=recorded)


def test_a_critic_follows_the_policy_unless_the_run_said_otherwise() -> None:
    changed = "--learning_rate", "3e-6", "--model", "elsewhere/m"
    args = replayed([], *changed)
    assert (args.critic_learning_rate, args.critic_model) == (3e-6, "elsewhere/m")
    args = replayed(["--critic_learning_rate", "5e-5", "--critic_model", "c"], *changed)
    assert (args.critic_learning_rate, args.critic_model) == (5e-5, "c")
