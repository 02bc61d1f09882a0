"""The rewards that are there without a plugin."""

from __future__ import annotations

import re
from typing import Any

from swift_r1.rewards.orm import ORM, orms

_THOUGHT_THEN_ANSWER = re.compile(r"</think>\s*<answer>")
_START, _END = "<think>", "</answer>"


def is_formatted(completion: str) -> bool:
    r"""Whether a completion is a think block, then an answer block, and nothing around them.

    The meaning of ms-swift's `^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])` (dot matches all), found in
    linear time: the earliest end of the thought leaves the most room for the answer.
    """
    if not completion.startswith(_START) or not completion.endswith(_END):
        return False
    middle = _THOUGHT_THEN_ANSWER.search(completion, len(_START))
    return middle is not None and middle.end() + len(_END) <= len(completion)


class Format(ORM):
    """1 for think tags, then answer tags, and nothing else; 0 otherwise."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        return [float(is_formatted(completion)) for completion in completions]


class GymReward(ORM):
    """The total reward of an environment's episode (--use_gym_env)."""

    def __call__(  # type: ignore[override]  # a reward names the columns it needs
        self, completions: list[str], rollout_infos: list[dict[str, Any]], **kwargs: Any
    ) -> list[float | None]:
        return [infos.get("total_reward") for infos in rollout_infos]


orms["format"] = Format
orms["gym_reward"] = GymReward
