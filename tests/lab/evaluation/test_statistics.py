"""pass@k and maj@k against brute force over all subsets; intervals that cover; the bootstrap's figures."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest

from swift_r1.training.evaluation.results import RULES, vote_classes
from swift_r1.training.evaluation.statistics import (
    majority_at_k,
    mean_estimate,
    mean_of,
    paired_difference,
    pass_at_k,
    wilson,
)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_mean_over_all_subsets(n: int) -> None:
    for right in range(n + 1):
        outcomes = [index < right for index in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(outcomes, k))
            assert pass_at_k(n, right, k) == pytest.approx(
                sum(map(any, subsets)) / len(subsets), abs=1e-15
            )


def test_majority_is_the_mean_over_all_subsets() -> None:
    rng = random.Random(1)
    for _ in range(60):
        n = rng.randint(1, 8)
        answers = [rng.choice([None, "a", "b", "c", "d"][: rng.randint(2, 5)]) for _ in range(n)]
        good = set(rng.sample("abcd", rng.randint(0, 2)))
        counts = Counter(answer for answer in answers if answer is not None)
        classes = [(count, answer in good) for answer, count in counts.items()]
        for k in range(1, n + 1):
            subsets = list(combinations(answers, k))
            mean = sum(_vote(subset, good) for subset in subsets) / len(subsets)
            assert majority_at_k(classes, answers.count(None), k) == pytest.approx(
                mean, abs=1e-12
            ), (answers, good, k)


def _vote(subset: tuple[str | None, ...], good: set[str]) -> float:
    """The same rule as said in words: the most frequent answer wins, equal ones by lot, no votes is wrong."""
    counts = Counter(answer for answer in subset if answer is not None)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    return sum(answer in good for answer in winners) / len(winners) if winners else 0.0


def test_one_completion_a_question_gives_wilsons_interval() -> None:
    one = mean_estimate([1.0] * 7 + [0.0] * 13)
    assert (one.low, one.high) == pytest.approx(wilson(0.35, 20))
    # Newcombe 1998, table I: 81 of 263.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    none, every = mean_estimate([0.0] * 30), mean_estimate([1.0] * 30)
    assert none.low == 0 and none.high == pytest.approx(0.1135, abs=5e-5)
    assert every.high == 1 and every.low == pytest.approx(1 - none.high)


def test_completions_of_a_question_do_not_count_as_questions() -> None:
    """Eight copies of each answer say no more than one; eight independent answers do."""
    copied = mean_estimate([1.0] * 20 + [0.0] * 20, draws=8)
    assert (copied.low, copied.high) == pytest.approx(wilson(0.5, 40))
    alike = mean_estimate([0.5] * 40, draws=8)
    assert (alike.low, alike.high) == pytest.approx(wilson(0.5, 320))


@pytest.mark.parametrize(("questions", "n"), [(30, 1), (30, 16), (500, 4)])
def test_the_interval_covers(questions: int, n: int) -> None:
    """Questions of very different difficulty: the truth is inside in about 95 of 100 evaluations."""
    rng = np.random.default_rng(3)
    inside = trials = 0
    for _ in range(600):
        difficulty = rng.beta(0.4, 1.2, size=questions)  # mean 0.25
        values = rng.binomial(n, difficulty) / n
        one = mean_estimate(values.tolist(), draws=n)
        inside += one.low <= 0.25 <= one.high
        trials += 1
    assert 0.92 <= inside / trials <= 0.985


def test_the_mean_over_benchmarks_counts_each_alike() -> None:
    parts = [mean_estimate([1.0, 0.0]), mean_estimate([1.0] * 100)]
    both = mean_of(parts)
    assert both.value == pytest.approx(0.75)
    assert both.standard_error == pytest.approx(
        math.hypot(parts[0].standard_error, parts[1].standard_error) / 2
    )


def test_the_bootstrap_is_paired_seeded_and_says_nothing_of_equal_runs() -> None:
    rng = np.random.default_rng(5)
    hard = rng.random(400)
    first = [float(x < 0.4) for x in hard]
    better = [float(x < 0.45) for x in hard]  # right wherever the first is, and a bit more
    pairs = [list(zip(first, better, strict=True))]
    found = paired_difference(pairs, seed=7)
    gain = np.mean(better) - np.mean(first)
    assert found.value == pytest.approx(gain) and found.questions == 400
    assert found.low > 0 and found.p_value < 0.01
    # The paired error: that of the differences alone, far below that of two independent runs.
    gains = np.array(better) - np.array(first)
    assert found.high - found.low == pytest.approx(2 * 1.96 * gains.std() / 20, rel=0.1)
    assert paired_difference(pairs, seed=7) == found
    assert paired_difference([[(b, a) for a, b in pairs[0]]], seed=7).value == pytest.approx(-gain)
    same = paired_difference([[(x, x) for x in first]], seed=7)
    assert (same.value, same.low, same.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("better", "equal", "p_value"), [(5, 25, 0.0625), (2, 0, 0.5), (1, 99, 1.0), (8, 22, 2**-7)]
)
def test_a_few_questions_that_differ_prove_little(better: int, equal: int, p_value: float) -> None:
    found = paired_difference([[(0.0, 1.0)] * better + [(1.0, 1.0)] * equal], seed=1)
    assert found.p_value == p_value and (found.low > 0) is (p_value < 0.05)


def test_the_p_value_counts_all_swaps_of_pairs() -> None:
    rng = random.Random(2)
    pairs = [
        [(rng.randrange(5) / 4, rng.randrange(5) / 4) for _ in range(count)] for count in (7, 4)
    ]
    gains = [(second - first) / (2 * len(one)) for one in pairs for first, second in one]
    sums = [
        sum(map(math.prod, zip(signs, gains, strict=True)))
        for signs in product((-1, 1), repeat=len(gains))
    ]
    as_far = sum(abs(one) >= abs(sum(gains)) - 1e-9 for one in sums) / len(sums)
    assert 0.01 < as_far < 1 and paired_difference(pairs, seed=1).p_value == pytest.approx(as_far)


@pytest.mark.parametrize(
    ("rule", "completions", "sizes", "silent"),
    [
        ("gsm8k", ["it is 1,000", "#### 1000", r"\boxed{1000.0}", "7", "no idea"], [3, 1], 1),
        (
            "math",
            [r"\boxed{\frac12}", r"\boxed{\dfrac{1}{2}}", r"\boxed{0.5}", "0.5", r"\boxed{x}"],
            [3, 1],
            1,
        ),
        # however it was written first
        ("math", [r"\boxed{\frac{2}{4}}", r"\boxed{\frac{1}{2}}"], [2], 0),
    ],
)
def test_answers_that_the_grader_takes_as_one_vote_together(
    rule: str, completions: list[str], sizes: list[int], silent: int
) -> None:
    answers = [RULES[rule].read(text) for text in completions]
    classes, none = vote_classes(answers, [False] * len(answers), RULES[rule].same)
    assert [size for size, _ in classes] == sizes and none == silent
