"""GSM8K: two ways to say what is right that other recipes take. The data set `gsm8k` and a reward of that name, which
compares numbers as numbers, are there without a plugin.

    swift rlhf --external_plugins plugins/gsm8k.py --dataset gsm8k --reward_funcs gsm8k_last_number ...
"""

from swift.rewards import ORM, orms

from swift_r1.rewards.graders import grade_gsm8k


class LastNumber(ORM):
    """1 if the last number of the text is, commas removed, letter for letter the solution (oat), else 0."""

    def __call__(self, completions, solution, **kwargs):
        return [
            grade_gsm8k(*item, mode="oat").score for item in zip(completions, solution, strict=True)
        ]


class AnswerTag(ORM):
    """1 if the first answer tag holds the solution and nothing else, commas removed from both (R1RL), else 0."""

    def __call__(self, completions, solution, **kwargs):
        pairs = zip(completions, solution, strict=True)
        return [grade_gsm8k(*item, mode="r1rl", strip_gold=True).score for item in pairs]


def gold(row):
    """A right completion, for `swift check`."""
    return f"<reasoning>I add it up.</reasoning>\n<answer>{row['solution']}</answer>"


orms["gsm8k_last_number"] = LastNumber
orms["gsm8k_answer_tag"] = AnswerTag
