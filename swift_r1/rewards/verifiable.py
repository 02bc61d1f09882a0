"""The graders as rewards, and ms-swift's `accuracy`."""

from __future__ import annotations

import re
from typing import Any, Literal

from swift_r1.rewards.graders import grade_countdown, grade_gsm8k, grade_math
from swift_r1.rewards.graders.library import parsed, verified
from swift_r1.rewards.orm import ORM, orms

# A named column says what the reward needs; that narrows `ORM`'s call, as in every plugin.
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Countdown(ORM):
    """`grade_countdown`; needs the columns `nums` and `target`."""

    def __call__(self, completions: list[str], nums: Any, target: Any, **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        return [grade_countdown(*item).score for item in zip(completions, nums, target, strict=True)]


class Gsm8k(ORM):
    """`grade_gsm8k` comparing numbers; needs the column `solution`, the right number."""

    def __call__(self, completions: list[str], solution: Any, **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        return [grade_gsm8k(*item).score for item in zip(completions, solution, strict=True)]


class Math(ORM):
    r"""`grade_math` by `--verifier` on the last `\boxed{}`; needs the column `solution`, one answer or a list."""

    answer: Literal["boxed", "tag", "tag_strict"] = "boxed"

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        # Arguments without the flag are those of a user's own program.
        self.verifier: Literal["fast", "math_verify"] = getattr(args, "verifier", "fast")

    def __call__(self, completions: list[str], solution: Any, **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        return [
            grade_math(text, gold, verifier=self.verifier, answer=self.answer).score
            for text, gold in zip(completions, solution, strict=True)
        ]


class MathTag(Math):
    """The same on the last answer tag, or the box in it."""

    answer = "tag"


class MathTagStrict(Math):
    """The same, and the text must go from thought to answer by a literal `</think> <answer>` (Dr. GRPO)."""

    answer = "tag_strict"


class MathAccuracy(ORM):
    r"""math_verify on the answer tag, or on the text where there is none: ms-swift's `accuracy`.

    Needs the column `solution`. A solution that math_verify cannot read gives no opinion (None), where ms-swift's
    gives 0: the completion is not to blame.
    """

    def __call__(self, completions: list[str], solution: Any, **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        return [_accuracy(*item) for item in zip(completions, solution, strict=True)]


def _accuracy(completion: str, solution: Any) -> float | None:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    first: dict[str, Any] = {"extraction_mode": "first_match"}
    right = _ANSWER.search(str(solution))
    gold = parsed(right[1].strip() if right else str(solution), **first)
    if not gold:
        return None
    tagged = _ANSWER.search(completion)
    if tagged is not None:
        return float(verified(gold, parsed(tagged[1].strip(), **first)))
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(basic_latex=True, units=True, malformed_operators=False, boxed="all"),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    return float(verified(gold, parsed(completion, extraction_config=[latex], **first)))


orms["countdown"] = Countdown
orms["gsm8k"] = Gsm8k
orms["math"] = Math
orms["math_tag"] = MathTag
orms["math_tag_strict"] = MathTagStrict
orms["accuracy"] = MathAccuracy
