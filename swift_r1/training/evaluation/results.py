"""From graded completions to the figures of one benchmark; the same for an evaluation in training and one alone.

Votes are on answers: those that a grader takes as the same are one. The gold answer is not seen by them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from swift_r1.rewards.graders.gsm8k import number_answer
from swift_r1.rewards.graders.math import math_answer, same_answer
from swift_r1.rewards.types import RIGHT
from swift_r1.training.evaluation.statistics import (
    MAX_VOTERS,
    MeanEstimate,
    ks,
    majority_at_k,
    mean_estimate,
    pass_at_k,
)


class AnswerRule(NamedTuple):
    """Knows how to read a completion's answer in a normal form (None without one), and to compare two of these."""

    read: Callable[[str], str | None]
    same: Callable[[str, str], bool]


RULES: Mapping[str, AnswerRule] = {
    "gsm8k": AnswerRule(
        lambda text: None if (found := number_answer(text)[0]) is None else str(found), str.__eq__
    ),
    "math": AnswerRule(math_answer, same_answer),
    "math_tag": AnswerRule(partial(math_answer, answer="tag"), same_answer),
    "math_tag_strict": AnswerRule(partial(math_answer, answer="tag_strict"), same_answer),
}
"""By the reward function that judges the completions; without a rule there is no maj@k."""


@dataclass(frozen=True, slots=True)
class Graded:
    """One completion of a question."""

    prompt_id: str
    reward: float | None  # what the reward function said; None for no opinion, which is not right
    # by the rule of the reward (`RULES`); None where there is no rule, or no answer
    answer: str | None
    tokens: int  # its length
    truncated: bool  # it was cut off at its limit

    @property
    def right(self) -> bool:
        return self.reward is not None and self.reward >= RIGHT


def graded_of(row: Mapping[str, Any]) -> Graded:
    """Returns what the figures need of a row of `completions.jsonl`."""
    return Graded(
        row["prompt_id"],
        row["reward"],
        row["answer"],
        row["tokens"],
        row["finish_reason"] == "length",
    )


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one benchmark."""

    questions: int
    n: int  # completions per question
    # `avg@n`, `pass@k`, and where answers can be compared `maj@k`, by name
    estimates: Mapping[str, MeanEstimate]
    mean_length: float  # in tokens
    # truncated, unanswered: shares of the completions; without a rule for answers the second is None
    truncated: float
    unanswered: float | None
    mean_reward: float | None  # over the completions with one
    # each question's value of each estimate, by `prompt_id`
    values: Mapping[str, Mapping[str, float]]

    @property
    def average(self) -> MeanEstimate:
        return self.estimates[f"avg@{self.n}"]

    @property
    def average_values(self) -> Mapping[str, float]:
        return self.values[f"avg@{self.n}"]

    def to_json(self) -> dict[str, Any]:
        """Returns what `report.json` holds; single questions are left to `completions.jsonl`."""
        content = {
            key: value for key, value in asdict(self).items() if key not in ("values", "estimates")
        }
        return content | {"metrics": {name: asdict(one) for name, one in self.estimates.items()}}

    def flat(self) -> dict[str, float]:
        """Returns what `logging.jsonl` holds: all estimates, and the intervals of those over all `n` completions."""
        found = {name: one.value for name, one in self.estimates.items()}
        for name, one in self.estimates.items():
            if name.endswith(f"@{self.n}"):
                found |= {f"{name}/low": one.low, f"{name}/high": one.high}
        found |= {"mean_length": self.mean_length, "truncated": self.truncated}
        return found if self.unanswered is None else found | {"unanswered": self.unanswered}


def summarize(graded: Sequence[Graded], reward: str | None) -> Result:
    """The figures of all completions of a benchmark, `n` of each question, in any order; `reward` tells how answers are
    read. Raises ValueError without completions, or with a different number of some question."""
    groups: dict[str, list[Graded]] = {}
    for one in graded:
        groups.setdefault(one.prompt_id, []).append(one)
    sizes = {len(group) for group in groups.values()}
    if len(sizes) != 1:
        raise ValueError(f"questions with {sorted(sizes)} completions")
    (n,) = sizes
    rule = RULES.get(reward or "")
    values: dict[str, dict[str, float]] = {f"avg@{n}": {}}
    for prompt_id, group in groups.items():
        right = [one.right for one in group]
        values[f"avg@{n}"][prompt_id] = sum(right) / n
        for k in ks(n):
            values.setdefault(f"pass@{k}", {})[prompt_id] = pass_at_k(n, sum(right), k)
        if rule is not None:
            classes, silent = vote_classes([one.answer for one in group], right, rule.same)
            for k in ks(n):
                if k > 2 and (k == n or k <= MAX_VOTERS):  # a vote of one or two is the average
                    values.setdefault(f"maj@{k}", {})[prompt_id] = majority_at_k(classes, silent, k)

    def draws(name: str) -> float:
        """Independent outcomes in a question's value."""
        kind, _, k = name.partition("@")
        return n if kind == "avg" else n / int(k)

    rewards = [
        one.reward for one in graded if one.reward is not None and not math.isnan(one.reward)
    ]
    return Result(
        questions=len(groups),
        n=n,
        estimates={
            name: mean_estimate(list(own.values()), draws(name)) for name, own in values.items()
        },
        mean_length=sum(one.tokens for one in graded) / len(graded),
        truncated=sum(one.truncated for one in graded) / len(graded),
        unanswered=None
        if rule is None
        else sum(one.answer is None for one in graded) / len(graded),
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
        values=values,
    )


def vote_classes(
    answers: Sequence[str | None], right: Sequence[bool], same: Callable[[str, str], bool]
) -> tuple[list[tuple[int, bool]], int]:
    """The different answers of one question: how many gave each, and whether it is right; and how many gave none.

    A class is as right as its most frequent spelling (of equally frequent ones the first): the vote is on answers, the
    gold answer comes after it.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    verdict = {
        answer: good for answer, good in zip(reversed(answers), reversed(right), strict=True)
    }
    # Frequent spellings first; `Counter` keeps the order in which they came.
    classes: list[tuple[str, int]] = []
    for answer, count in counts.most_common():
        place = next((at for at, (known, _) in enumerate(classes) if same(answer, known)), None)
        if place is None:
            classes.append((answer, count))
        else:
            known, before = classes[place]
            classes[place] = known, before + count
    return [(count, verdict[answer]) for answer, count in classes], len(answers) - sum(
        counts.values()
    )
