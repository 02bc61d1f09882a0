"""The Countdown grader: both modes, hostile completions, and never a wrong 1 (against brute force)."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.rewards.graders import Grade, grade_countdown

RIGHT = "<think>1 + 2 = 3</think>\n<answer>(1 + 2) * 3</answer>"


def reachable(nums: tuple[int, ...]) -> set[Fraction]:
    """Every value that some expression over all of `nums` has, by combining pairs until one is left."""

    def combine(terms: tuple[Fraction, ...]) -> set[Fraction]:
        if len(terms) == 1:
            return {terms[0], -terms[0]}
        found = set()
        for i, j in permutations(range(len(terms)), 2):
            rest = tuple(term for k, term in enumerate(terms) if k not in (i, j))
            a, b = terms[i], terms[j]
            results = [a + b, a - b, a * b, -a - b, b - a, *([a / b] if b else [])]
            for result in results:
                found |= combine((result, *rest))
        return found

    return combine(tuple(map(Fraction, nums)))


@pytest.mark.parametrize(
    ("completion", "ms_swift", "oat"),
    [
        ("<answer>(1 + 2) * 3</answer>", Grade(1.0, True), Grade(1.0, True)),
        (RIGHT, Grade(1.0, True), Grade(1.0, True)),
        # oat evaluates all of the tag
        ("<answer>(1+2)*3 = 9</answer>", Grade(1.0, True), Grade(0.1, True)),
        # what follows = is not read
        ("<answer>(1+2)*3 = 8</answer>", Grade(1.0, True), Grade(0.1, True)),
        ("<answer>3*2*1</answer> <answer>(1+2)*3</answer>", Grade(1.0, True), Grade(1.0, True)),
        ("<answer>(1+2)*3</answer> <answer>3*2*1</answer>", Grade(0.0, True), Grade(0.1, True)),
        (f"<think>{RIGHT}</think> <answer>3*2*1</answer>", Grade(0.0, True), Grade(0.1, True)),
        (f"<think>So {RIGHT.partition('</think>')[2]}", Grade(0.0, False), Grade(1.0, True)),
        (f"I write <answer></answer></think> {RIGHT}", Grade(1.0, True), Grade(1.0, True)),
        ("<answer>(1+2)*3</answer>\nso it is", Grade(1.0, True), Grade(0.0, False)),
        ("<answer>\n(1+2)*3\n</answer>", Grade(1.0, True), Grade(0.0, False)),
        ("(1+2)*3", Grade(0.0, False), Grade(0.0, False)),
        ("<answer>(1+2)*3", Grade(0.0, False), Grade(0.0, False)),
        ("<answer></answer>", Grade(0.0, True), Grade(0.1, True)),
        ("<answer>9</answer>", Grade(0.0, True), Grade(0.1, True)),
        ("<answer>(1+2)*3+1-1</answer>", Grade(0.0, True), Grade(0.1, True)),
        ("<answer>12*3/4</answer>", Grade(0.0, True), Grade(0.1, True)),
        ("<answer>9**9**9</answer>", Grade(0.0, True), Grade(0.1, True)),
        ("", Grade(0.0, False), Grade(0.0, False)),
    ],
)
def test_modes(completion: str, ms_swift: Grade, oat: Grade) -> None:
    assert grade_countdown(completion, [1, 2, 3], 9) == ms_swift
    assert grade_countdown(completion, [1, 2, 3], 9, mode="oat") == oat


def test_exact_fractions() -> None:
    assert grade_countdown("<answer>8 / (3 - 8 / 3)</answer>", [3, 3, 8, 8], 24).score == 1.0
    assert grade_countdown("<answer>1 / 3 * 3</answer>", [1, 3, 3], 1).score == 1.0
    # equal as floats, not as numbers
    assert (
        grade_countdown(
            "<answer>100000000000000/3*3/3-1</answer>",
            [100000000000000, 3, 3, 3, 1],
            33333333333332,
        ).score
        == 0
    )


def test_numbers_as_data_files_have_them() -> None:
    assert grade_countdown(RIGHT, ["1", 2.0, 3], "9").score == 1.0
    with pytest.raises(ValueError, match="whole"):
        grade_countdown(RIGHT, [1, 2, 3], 9.5)
    with pytest.raises(ValueError, match="mode"):
        grade_countdown(RIGHT, [1, 2, 3], 9, mode="trl")  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789+-*/()= <>answer\n", max_size=60), st.booleans())
def test_never_raises(text: str, tagged: bool) -> None:
    completion = f"<answer>{text}</answer>" if tagged else text
    for mode in ("ms_swift", "oat"):
        assert grade_countdown(completion, [1, 2, 3], 6, mode).score in (0.0, 0.1, 1.0)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=3), st.integers(-20, 100), st.data())
def test_never_a_wrong_one(nums: list[int], target: int, data: st.DataObject) -> None:
    """Random expressions over the right numbers: a 1 is only given for a target that brute force reaches."""
    order = data.draw(st.permutations(nums))
    text = str(order[0])
    for number in order[1:]:
        operator = data.draw(st.sampled_from(["+", "-", "*", "/", "**", "//", " "]))
        text = data.draw(
            st.sampled_from(
                [f"({text}){operator}{number}", f"{text}{operator}{number}", f"-{text}"]
            )
        )
    score = grade_countdown(f"<answer>{text}</answer>", nums, target).score
    if score == 1.0:
        assert Fraction(target) in reachable(tuple(nums))


@pytest.mark.parametrize(
    "completion",
    [
        "<answer>" * 12500,
        "</answer>" * 12500,
        "<answer>1</answer>" * 6000,
        "<answer>" + "(" * 100000 + "</answer>",
        "<answer>9**9**9</answer>",
        "<answer>" + "9" * 100000 + "</answer>",
        "<answer>" + "-" * 900 + "1</answer>",
        "<answer>" + "*".join(["999999999999999"] * 60) + "</answer>",
        "\n" * 100000,
    ],
)
def test_hostile_completions_are_graded_at_once(completion: str) -> None:
    started = time.process_time()
    for mode in ("ms_swift", "oat"):
        assert grade_countdown(completion, [1, 2, 3], 6, mode).score < 1
    assert time.process_time() - started < 0.2
