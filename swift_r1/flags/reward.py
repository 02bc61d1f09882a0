"""Flags of plugins and rewards, the built-in ones too."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import PurePosixPath

from swift_r1.flags.algorithm import NO_GROUPS
from swift_r1.flags.fields import Scope, check_url, flag, resumable_flag

NO_REWARD = "--reward_funcs is missing: names of reward functions; their weighted sum is the reward"

MATH_REWARDS = ("math", "math_tag", "math_tag_strict")
"""Rewards that `--verifier` is for."""

_POOL = Scope(lambda args: args.reward_isolation != "inline", "with --reward_isolation inline")


def _of_reward(name: str) -> Scope:
    """Returns the scope of a built-in reward; a plugin's reward may read the flag too."""
    return Scope(
        lambda args: name in args.reward_funcs or bool(args.external_plugins),
        f"without --reward_funcs {name}",
    )


_MATH = Scope(
    lambda args: bool(
        {*MATH_REWARDS} & {*args.reward_funcs} or args.external_plugins or args.eval_datasets
    ),
    f"without one of the rewards {', '.join(MATH_REWARDS)} (--reward_funcs)",
)
_API = Scope(
    lambda args: "api" in args.reward_funcs, "without api among --reward_funcs", allow_default=True
)
_MODELS = Scope(lambda args: bool(args.reward_model), "without --reward_model")
_JUDGE = Scope(
    lambda args: "judge" in args.reward_funcs,
    "without judge among --reward_funcs",
    allow_default=True,
)
_COSINE, _REPETITION, _SOFT = map(_of_reward, ("cosine", "repetition", "soft_overlong"))


def _check_judge(value: str) -> None:
    from swift_r1.rewards.judge_config import judge_text  # pydantic takes a while

    judge_text(value)


@dataclass(frozen=True, kw_only=True)
class PluginArguments:
    """Plugins and rewards."""

    external_plugins: list[str] = flag(
        [], "Python files that register rewards and datasets", aliases=("custom_register_path",)
    )
    reward_timeout: float = resumable_flag(
        10.0, "seconds per completion before a reward call's process is killed", more_than=0
    )
    reward_num_workers: int = resumable_flag(
        2,
        "processes that compute rewards (on a machine with a GPU by default half of the cores, 2 to 8)",
        _POOL,
        at_least=1,
    )
    reward_isolation: str = flag(
        "process",
        "where rewards run: in processes that can be killed, or inline in the trainer (stateful or GPU rewards; "
        "no time-out, no memory limit)",
        choices=("process", "inline"),
    )
    reward_memory_limit: float = resumable_flag(
        2.0,
        "GiB that a reward process may take beyond what loading the plugins took",
        _POOL,
        more_than=0,
    )
    reward_env: list[str] = flag(
        [],
        "environment variables that rewards may see although they look like secrets or proxies",
        _POOL,
    )


@dataclass(frozen=True, slots=True)
class RewardModel:
    """One of `--reward_model`, with what the other flags say of it. `name` is that of its column."""

    name: str
    path: str
    plugin: str
    adapters: str | None
    template: str | None


@dataclass(frozen=True, kw_only=True)
class RewardArguments(PluginArguments):
    """Plugins and rewards."""

    reward_funcs: list[str] = flag(
        [],
        "names of reward functions; their weighted sum is the reward (required, except with an agent, or with "
        "--use_gym_env true here or at the server)",
    )
    reward_model: list[str] = flag(
        [], "folders or hub ids of reward models, whose rewards follow --reward_funcs"
    )
    reward_model_plugin: list[str] = flag(
        [],
        "how each one scores: default (a classification head), genrm (a generative judge) or a plugin's name",
        _MODELS,
    )
    reward_adapters: list[str] = flag([], "LoRA adapters of each reward model", _MODELS)
    reward_template: list[str] = flag(
        [],
        "template of each reward model's conversations, as --prompt_template (default: its tokenizer's chat template)",
        _MODELS,
        aliases=("reward_model_template",),
    )
    reward_weights: list[float] | None = flag(
        None, "one weight per reward function, then per reward model (default: 1 each)"
    )
    renormalize_reward_weights: bool = flag(
        False, "where a function returns None, scale the other weights up to the same sum"
    )
    multi_objective_aggregation: str = flag(
        "sum_then_normalize",
        "whether advantages are scaled after the rewards are summed, or each reward in its group before (GDPO)",
        NO_GROUPS,
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    truncated_reward: float | None = flag(
        None,
        "reward of every truncated completion, in place of the functions'",
        instead_of=("missing_eos_penalty",),
    )
    missing_eos_penalty: float | None = flag(
        None, "subtracted from the reward of a truncated completion", more_than=0
    )
    reward_api: str | None = flag(
        None,
        "URL to which the reward function `api` posts completions and columns; token: SWIFT_REWARD_API_TOKEN",
        _API,
        check=check_url,
    )
    judge: str | None = flag(
        None,
        "YAML file or JSON that configures the reward `judge`: a model behind an OpenAI-compatible API "
        "(docs/rewards.md)",
        _JUDGE,
        objects=True,
        check=_check_judge,
    )
    max_invalid_reward_ratio: float = flag(
        0.2,
        "share of invalid rewards (exception, NaN, timeout) above which the run stops; a round without any valid "
        "reward stops it too; 1 turns both off",
        at_least=0,
        at_most=1,
    )

    recheck_rewards: bool = flag(
        True,
        "ask the reward functions again about up to 64 completions of rounds 8, 16, 32 and so on, which shows whether "
        "their answers are reproducible and fit their rows",
    )

    @property
    def reward_models(self) -> list[RewardModel]:
        """Named by the end of the path; of several with one end, the later ones by a number too."""
        models: list[RewardModel] = []
        for place, path in enumerate(self.reward_model):
            name = end = PurePosixPath(path.rstrip("/")).name or "reward_model"
            times = itertools.count(2)
            while name in (model.name for model in models):
                name = f"{end}_{next(times)}"
            plugin, adapters, template = (
                next(iter(values[place:]), None)
                for values in (self.reward_model_plugin, self.reward_adapters, self.reward_template)
            )
            models.append(RewardModel(name, path, plugin or "default", adapters, template))
        return models

    @property
    def called_rewards(self) -> list[str]:
        """`--reward_funcs` without the models, which may be among them."""
        models = {model.name for model in self.reward_models}
        return [name for name in self.reward_funcs if name not in models]


@dataclass(frozen=True, kw_only=True)
class VerifierArguments:
    """Built-in rewards."""

    verifier: str = flag(
        "fast",
        f"{', '.join(MATH_REWARDS)}: compares normalised answers and their values, or asks the library math_verify too "
        "(docs/rewards.md)",
        _MATH,
        choices=("fast", "math_verify"),
    )


@dataclass(frozen=True, kw_only=True)
class BuiltinRewardArguments(VerifierArguments):
    """Built-in rewards."""

    cosine_min_len_value_wrong: float = flag(-0.5, "cosine: a wrong answer of length 0", _COSINE)
    cosine_max_len_value_wrong: float = flag(0.0, "cosine: a wrong answer of full length", _COSINE)
    cosine_min_len_value_correct: float = flag(1.0, "cosine: a correct answer of length 0", _COSINE)
    cosine_max_len_value_correct: float = flag(
        0.5, "cosine: a correct answer of full length", _COSINE
    )
    cosine_max_len: int | None = flag(
        None, "cosine: full length (default: --max_completion_length)", _COSINE, at_least=1
    )
    repetition_n_grams: int = flag(3, "repetition: words of an n-gram", _REPETITION, at_least=1)
    repetition_max_penalty: float = flag(
        -1.0, "repetition: the value where all n-grams repeat", _REPETITION, at_most=0
    )
    soft_max_length: int | None = flag(
        None,
        "soft_overlong: tokens at which it is -1 (default: --max_completion_length)",
        _SOFT,
        at_least=2,
    )
    soft_cache_length: int | None = flag(
        None,
        "soft_overlong: tokens before that over which it falls from 0; required with it",
        _SOFT,
        at_least=1,
    )
