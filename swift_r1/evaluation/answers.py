"""What a completion answers, for votes: answers that a grader takes as the same are one. The gold is not seen here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swift_r1.rewards.graders.gsm8k import number_answer
from swift_r1.rewards.graders.math import math_answer, same_answer


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """How answers are read and compared.

    Attributes:
        read: a completion's answer in one spelling, None where it gives none.
        same: whether two such answers are the same.
    """

    read: Callable[[str], str | None]
    same: Callable[[str, str], bool]


def _number(completion: str) -> str | None:
    number, _ = number_answer(completion)
    return None if number is None else str(number)


RULES: Mapping[str, AnswerRule] = {
    "gsm8k": AnswerRule(_number, str.__eq__),
    "math": AnswerRule(math_answer, same_answer),
    "math_tag": AnswerRule(lambda completion: math_answer(completion, "tag"), same_answer),
    "math_tag_strict": AnswerRule(lambda completion: math_answer(completion, "tag_strict"), same_answer),
}
"""By the reward function that judges the completions; without a rule there is no maj@k."""


def vote_classes(
    answers: Sequence[str | None], right: Sequence[bool], same: Callable[[str, str], bool]
) -> tuple[list[tuple[int, bool]], int]:
    """The different answers of one question: how many gave each, and whether it is right; and how many gave none.

    A class is as right as its most frequent spelling (of equally frequent ones the first): the vote is on answers, the
    gold answer comes after it.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    verdict = {answer: good for answer, good in zip(reversed(answers), reversed(right), strict=True)}
    # Frequent spellings first; `Counter` keeps the order in which they came.
    classes: list[tuple[str, int]] = []
    for answer, count in counts.most_common():
        place = next((at for at, (known, _) in enumerate(classes) if same(answer, known)), None)
        if place is None:
            classes.append((answer, count))
        else:
            known, before = classes[place]
            classes[place] = known, before + count
    return [(count, verdict[answer]) for answer, count in classes], len(answers) - sum(counts.values())
