"""Flags of the built-in rewards: `math` and its like, `cosine`, `repetition` and `soft_overlong`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_r1.arguments.fields import flag
from swift_r1.arguments.parser import Fault

if TYPE_CHECKING:
    from swift_r1.arguments.rlhf import RlhfArguments

MATH_REWARDS = ("math", "math_tag", "math_tag_strict")
"""Those that `--verifier` is for."""

_FLAGS_OF = {
    "cosine": (
        *("cosine_min_len_value_wrong", "cosine_max_len_value_wrong", "cosine_min_len_value_correct"),
        *("cosine_max_len_value_correct", "cosine_max_len"),
    ),
    "repetition": ("repetition_n_grams", "repetition_max_penalty"),
    "soft_overlong": ("soft_max_length", "soft_cache_length"),
}


@dataclass(frozen=True, kw_only=True)
class VerifierArguments:
    """Built-in rewards."""

    verifier: str = flag(
        "fast",
        f"{', '.join(MATH_REWARDS)}: compares tidied answers and their values, or asks the library math_verify too "
        "(docs/rewards.md)",
        choices=("fast", "math_verify"),
    )


@dataclass(frozen=True, kw_only=True)
class BuiltinRewardArguments(VerifierArguments):
    """Built-in rewards."""

    cosine_min_len_value_wrong: float = flag(-0.5, "cosine: a wrong answer of no length")
    cosine_max_len_value_wrong: float = flag(0.0, "cosine: a wrong answer of full length")
    cosine_min_len_value_correct: float = flag(1.0, "cosine: a correct answer of no length")
    cosine_max_len_value_correct: float = flag(0.5, "cosine: a correct answer of full length")
    cosine_max_len: int | None = flag(
        None, "cosine: full length in tokens (default: --max_completion_length)", at_least=1
    )
    repetition_n_grams: int = flag(3, "repetition: words of an n-gram", at_least=1)
    repetition_max_penalty: float = flag(-1.0, "repetition: the value where all n-grams repeat", at_most=0)
    soft_max_length: int | None = flag(
        None, "soft_overlong: tokens at which it is -1 (default: --max_completion_length)", at_least=2
    )
    soft_cache_length: int | None = flag(
        None, "soft_overlong: tokens before that over which it falls from 0; needed with it", at_least=1
    )


def builtin_reward_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Flags of a reward that is not used (a plugin's reward may read them from `args`), and lengths that clash."""
    for reward, names in _FLAGS_OF.items():
        unused = [f"--{name}" for name in names if name in given]
        if unused and reward not in args.reward_funcs and not args.external_plugins:
            verb = "has" if len(unused) == 1 else "have"
            yield Fault(f"{', '.join(unused)} {verb} no effect without --reward_funcs {reward}", ("reward_funcs",))
    may_judge = set(MATH_REWARDS) & set(args.reward_funcs) or args.external_plugins or args.eval_datasets
    if "verifier" in given and not may_judge:
        yield Fault(f"--verifier has no effect without one of the rewards {', '.join(MATH_REWARDS)}", ("reward_funcs",))
    if "soft_overlong" not in args.reward_funcs:
        return
    longest = args.soft_max_length or args.max_completion_length
    flags = ("soft_cache_length", "soft_max_length", "max_completion_length")
    if args.soft_cache_length is None:
        yield Fault("--reward_funcs soft_overlong needs --soft_cache_length", flags)
    elif args.soft_cache_length >= longest:
        yield Fault(f"--soft_cache_length {args.soft_cache_length} must be below --soft_max_length {longest}", flags)
