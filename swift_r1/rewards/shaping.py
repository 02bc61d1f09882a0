"""Built-in rewards for form and length, with ms-swift's names, parameters and formulas.

`react_format` looks at the form of an agent's turn; `cosine` scales correctness by length and `repetition` counts
repeated word n-grams (Yeo et al. 2025, arXiv:2502.03373); `soft_overlong` punishes the last stretch before the length
limit (DAPO, arXiv:2503.14476). Lengths are in tokens, from `response_token_ids`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from swift_r1.rewards.orm import ORM, orms

_THOUGHT_THEN_ACTION = re.compile(r"</think>\s*Action:")
_START, _INPUT = "<think>", "Action Input:"


class ReActFormat(ORM):
    """1 for a thought in think tags, then `Action:` and `Action Input:`; 0 otherwise."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        return [float(is_react(completion)) for completion in completions]


def is_react(completion: str) -> bool:
    r"""Whether a completion begins like ms-swift's `^<think>.*?</think>\s*Action:.*?Action Input:.*?$` (dot matches
    all), found in linear time: the earliest action leaves the most room for its input."""
    if not completion.startswith(_START):
        return False
    action = _THOUGHT_THEN_ACTION.search(completion, len(_START))
    return action is not None and completion.find(_INPUT, action.end()) >= 0


class CosineReward(ORM):
    """Correct answers earn less the longer they are, wrong ones lose less: a half cosine over the length.

    Where `t` is the length, `T = --cosine_max_len`, and `r_0`, `r_T` the values at no and at full length of a correct
    (or a wrong) answer: `r = r_T + (r_0 - r_T) * (1 + cos(pi * t / T)) / 2`.

    Args:
        args: the run's arguments, for the `--cosine_*` flags.
        accuracy_orm: says what is correct (a value of at least 1); the reward `accuracy` by default.

    Raises:
        ValueError: there is no reward `accuracy`.
    """

    def __init__(self, args: Any, accuracy_orm: Callable[..., Sequence[float | None]] | None = None) -> None:
        super().__init__(args)
        self.at_zero = {True: args.cosine_min_len_value_correct, False: args.cosine_min_len_value_wrong}
        self.at_full = {True: args.cosine_max_len_value_correct, False: args.cosine_max_len_value_wrong}
        self.max_len = args.cosine_max_len
        if accuracy_orm is None:
            if "accuracy" not in orms:
                raise ValueError("cosine scales the reward accuracy, and no reward of that name is registered")
            accuracy_orm = orms["accuracy"](args=args)
        self.accuracy_orm = accuracy_orm

    def __call__(  # type: ignore[override]  # a reward names the columns it needs
        self, completions: list[str], solution: list[Any], response_token_ids: list[Any], **kwargs: Any
    ) -> list[float | None]:
        found = self.accuracy_orm(completions, solution, response_token_ids=response_token_ids, **kwargs)
        return [
            None if value is None else self.scaled(value >= 1.0, token_count(ids))
            for value, ids in zip(found, response_token_ids, strict=True)
        ]

    def scaled(self, correct: bool, length: int) -> float:
        """The reward of an answer of `length` tokens; beyond the full length it stays what it is there."""
        start, end = self.at_zero[correct], self.at_full[correct]
        return end + (start - end) * (1 + math.cos(math.pi * min(length / self.max_len, 1))) / 2


class RepetitionPenalty(ORM):
    """`--repetition_max_penalty` times the share of word n-grams (`--repetition_n_grams`) that came before."""

    def __init__(self, args: Any, **kwargs: Any) -> None:
        super().__init__(args)
        self.ngram_size = args.repetition_n_grams
        self.max_penalty = args.repetition_max_penalty

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        return [self.max_penalty * repeated_share(completion, self.ngram_size) for completion in completions]


def repeated_share(text: str, size: int) -> float:
    """The share of the text's n-grams (words in lower case) that are repeats; 0 where it has none."""
    words = text.lower().split()
    ngrams = list(zip(*(words[start:] for start in range(size)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


class SoftOverlong(ORM):
    """0 up to `--soft_max_length - --soft_cache_length` tokens, then falling in a line to -1 at `--soft_max_length`
    and beyond."""

    def __init__(self, args: Any, **kwargs: Any) -> None:
        super().__init__(args)
        if not 0 < args.soft_cache_length < args.soft_max_length:
            raise ValueError(f"soft_cache_length {args.soft_cache_length} is not below {args.soft_max_length}")
        self.soft_max_length = args.soft_max_length
        self.soft_cache_length = args.soft_cache_length

    def __call__(  # type: ignore[override]  # as above
        self, completions: list[str], response_token_ids: list[Any], **kwargs: Any
    ) -> list[float | None]:
        free = self.soft_max_length - self.soft_cache_length
        lengths = map(token_count, response_token_ids)
        return [max(-1.0, min((free - length) / self.soft_cache_length, 0.0)) for length in lengths]


def token_count(ids: Sequence[Any]) -> int:
    """Tokens of a completion: its ids, or the lists of its turns' ids."""
    return sum(map(len, ids)) if ids and isinstance(ids[0], list) else len(ids)


orms["react_format"] = ReActFormat
orms["cosine"] = CosineReward
orms["repetition"] = RepetitionPenalty
orms["soft_overlong"] = SoftOverlong
