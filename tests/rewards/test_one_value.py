"""What counts as an answer: one value, behind the thought, in the last place, and equal by its own size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_r1.rewards.graders import grade_gsm8k, grade_math
from swift_r1.rewards.graders.answers import answered, last_answer, written_answer
from swift_r1.rewards.orm import build_reward

PLACES = (r"So it is \boxed{%s}.", "<answer>%s</answer>", "The answer is %s.", "#### %s")
accuracy = build_reward("accuracy")


def values(text: str, gold: str) -> dict[str, float | None]:
    """What each reward says that reads something in the text; gsm8k where the gold is a number."""
    tag = "tag" if "<answer>" in text else "boxed"
    found: dict[str, float | None] = {"accuracy": accuracy.call([text], {"solution": [gold]})[0]}
    for verifier in ("fast", "math_verify"):
        found[verifier] = grade_math(text, gold, verifier, tag).score  # type: ignore[arg-type]
    if gold.replace("/", "").replace("-", "").isdigit():
        found["gsm8k"] = grade_gsm8k(text, gold).score
    return found


NOT_17 = (
    r"17 or 18|16 or 17|either 16 or 17|not 17|x > 17|\ge 17|x \ne 17|17?|17+|at least 17|no more than 17|17 or more"
    r"|between 16 and 17|16-17|16–17|from 16 to 17|16 and 17|16, 17|17!|17k|17 thousand|17 million people|17 dozen"
    r"|16 (or 17)|17x|17 x|17\pi|17^2|17\sqrt{2}|\sqrt{17}|17 squared|17 feet 10 inches|10 feet 17 inches|1 in 17|about 17"
    r"|maybe 17|isn't 17|17/2|17 1/2|1 17/18|17:30|12:17|-17|–17|−17|17 and a half|16 dollars and 17 cents|half of 17"
    r"|17 thirds|minus 17|\text{not }17|17\text{ or more}|17\text{ million dollars}|5\text{ feet }17\text{ inches}"
    r"|17千|不是17|至少17|大约17|17或18|17多个|17以上|\pm 17|over 17|f(17)|17th|17 \times 10^2|-(17)"
)


@pytest.mark.parametrize("answer", NOT_17.split("|"))
def test_what_is_not_one_value_is_not_cut_to_a_number(answer: str) -> None:
    for place in PLACES:
        assert set(values(place % answer, "17").values()) == {0.0}, place


@pytest.mark.parametrize(
    "answer", [r"2,2\text{ or }1,2", "1,2 and 2,2", "1,2 or 1,2", "1, 2, and 1"]
)
def test_lists_are_not_joined_to_the_one_that_is_right(answer: str) -> None:
    for place in PLACES:
        assert not any(values(place % answer, "1,2").values()), place


UNITS = r"17|$17$|17.|17.0|$17|17 dollars|**17**|17个|17美元|１７|\text{17}|17\text{ cm}|17%"


@pytest.mark.parametrize("answer", UNITS.split("|"))
def test_one_value_is_read_with_its_unit(answer: str) -> None:
    for place in PLACES[:3]:
        found = values(place % answer, "17")
        if place == PLACES[2]:
            del found["fast"], found["math_verify"]  # they read boxes and tags
        assert set(found.values()) == {1.0}, (place, found)
    assert grade_gsm8k(PLACES[3] % answer, "17").score == 1.0


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("17 or 18", ["17 or 18"], ["17", "18"]),
        ("1331 and 1728", ["1331 and 1728", "1331, 1728"], ["1331", "1728"]),
        ("5 feet 10 inches", ["5 feet 10 inches"], ["5", "10", "10 feet 5 inches"]),
        (r"5\text{ feet }10\text{ inches}", [r"5\text{ feet }10\text{ inches}"], ["5", "10"]),
        ("1 in 6", ["1/6", r"\frac16", "1 out of 6"], ["6", "1", "6 in"]),
        ("no more than 5", ["no more than 5"], ["5"]),
        ("between 3 and 4", [], ["3", "4"]),
        ("5 thousand", [], ["5"]),
        ("18 dollars", ["18", "18 dollars"], ["18 cents", "81"]),
        ("3:2", ["3:2"], ["2", "3"]),
        ("8/3", ["2 2/3", r"2\frac{2}{3}", "2⅔"], ["4/3", "2 1/3"]),
        ("4/3", ["1 1/3"], ["2 2/3"]),
        (
            "E",
            ["E: the longest one", "(E) 42", "E. none of these", "Option E", "**E**"],
            ["E or D", "D: E"],
        ),
        (r"\text{(E)}", ["(E) the last"], ["(E) or (D)", "E: or D"]),
        ("(1,2)", ["（1，2）"], ["（2，1）", "[1,2]"]),
        (
            "[-2,7]",
            [r"-2 \le x \le 7", r"7 \ge x \ge -2", "-2 ≤ x ≤ 7"],
            [r"-2 < x \le 7", r"-2 \le x \le 8"],
        ),
        (r"(-\infty,3)", ["x < 3", "3 > x"], ["x > 3", r"x \le 3", "3"]),
        ("2516_8", ["2516_{8}"], ["2516_9"]),
        ("50%", ["50"], ["5000%"]),
        ("-5", ["–5", "−5"], ["5"]),
        (
            r"\frac{3}{5}",
            ["3/5"],
            [r"\frac{3}{5}?", r"\frac{3}{5}\text{ million}", r"\frac35\text{ dozen}"],
        ),
        (r"6\text{ million}", [r"6 \text{ million}"], ["6", r"6\text{ thousand}"]),
    ],
)
def test_golds_in_words_and_other_spellings(gold: str, right: list[str], wrong: list[str]) -> None:
    for answers, value in ((right, 1.0), (wrong, 0.0)):
        for answer in answers:
            found = values(PLACES[0] % answer, gold)
            found.pop("gsm8k", None)
            if value and " " in gold:
                del found["math_verify"]  # words are the business of `accuracy`
            assert set(found.values()) == {value}, (answer, found)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{3^{50}+1}{2\cdot 3^{50}}", r"\frac{3^{50}-1}{2\cdot 3^{50}}"),
        (r"\frac{100!}{102!}", r"\frac{1}{2^{99}}"),
        (r"1.67\times10^{-27}", r"9.11\times10^{-31}"),
        (r"0.00000012\%", r"0.00000013\%"),
        (r"\sqrt{10^{100}+1}-10^{50}", r"\sqrt{10^{100}+2}-10^{50}"),
        (r"1-e^{-200}", r"1+e^{-200}"),
        (r"\sqrt{2}", r"\sqrt{2}+10^{-50}"),
        (r"\sqrt{2}", "1.414214"),
        ("18.5", "18.50000001"),
        ("100!", "100!+1"),
        ("10^{-20}x", "10^{-21}x"),
        (r"e^{at}", r"e^{at}-10^{-30}"),
        ("(10^{-20},2)", "(10^{-21},2)"),
        (r"\lfloor\frac{2n-1}{5}\rfloor", r"\lfloor\frac{2n-1.000000001}{5}\rfloor"),
        (r"\lfloor\frac{2n-1}{5}\rfloor", r"\lfloor\frac{2n-1}{5}\rfloor (1-7^{-40})"),
    ],
)
def test_numbers_differ_by_their_own_size(gold: str, answer: str) -> None:
    for first, second in ((gold, answer), (answer, gold)):
        assert set(values(PLACES[0] % second, first).values()) == {0.0}
        assert set(values(PLACES[0] % first, first).values()) == {1.0}


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"1.67\times10^{-27}", r"16.7\times10^{-28}"),
        (r"\sqrt{8}\cdot 10^{-40}", r"2\sqrt{2}\cdot 10^{-40}"),
        (r"\frac{3^{50}+1}{2\cdot 3^{50}}", r"\frac12+\frac{1}{2\cdot 3^{50}}"),
        (r"7.4\times 10^{-12}", "0.0000000000074"),
        ("1.5", r"\frac32"),
    ],
)
def test_equal_numbers_stay_equal(gold: str, answer: str) -> None:
    assert set(values(PLACES[0] % answer, gold).values()) == {1.0}


THOUGHT = r"\boxed{2} <answer>2</answer> The answer is 2."


@pytest.mark.parametrize(
    "text",
    [
        rf"<think>{THOUGHT}</think> The answer is 3.",
        rf"{THOUGHT}</think> \boxed{{3}} <answer>3</answer>",
        rf"<think>{THOUGHT}",
        rf"<think>a</think> so <think>{THOUGHT}",
        rf"<think>{THOUGHT}</think>",
        r"\boxed{2}. Let me restate: \boxed{3",
        "<answer>2</answer> no, <answer>3",
        r"<answer>\boxed{2} or \boxed{3</answer>",
        r"<answer>2</answer> <answer>3</answer> \boxed{3}",
    ],
)
def test_the_thought_and_what_is_cut_off_are_no_answer(text: str) -> None:
    assert set(values(text, "2").values()) == {0.0}
    assert grade_gsm8k(text, "2").score == grade_math(text, "2").score == 0.0


def test_every_reader_takes_the_last_place_behind_the_thought() -> None:
    text = (
        "<think>I end with <answer> </answer> tags.</think> <answer>1</answer> <answer>2</answer>"
    )
    assert set(values(text, "2").values()) == {1.0}
    assert grade_math(text, "2", answer="tag_strict").score == 1.0
    assert answered("a</think>b</think>c") == "c" and answered("<think>a") == ""
    assert last_answer("<answer>a<answer>b</answer>") == "b" and last_answer("<answer>b") is None
    assert written_answer(r"\boxed{1} \boxed{2}") == "2" and written_answer("2") is None
    calls = ["<think>Action: a Action Input: 1</think>Action: b Action Input: 2"]
    solution = {"solution": ["Action: b Action Input: 2"]}
    assert build_reward("toolbench").call(calls, solution) == [1.0]
    assert build_reward("toolbench").call([calls[0] + "<think>"], solution) == [0.0]


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("The answer is 1/2.", "2", False),
        ("The answer is 1/2.", "1/2", True),
        ("It is 11 5/6.", "71/6", True),
        (r"so 11\frac{5}{6}", "71/6", True),
        ("3+4=7，所以答案是3。", "3", True),
        ("因此，她每天赚18美元。", "18", True),
        ("总共5千元", "5000", True),
        ("She pays $5k", "5000", True),
        ("She has 2 dozen eggs.", "24", True),
        ("#### 5 million", "5000000", True),
        ("So she needs 18 more apples.", "18", True),
        ("She makes $18 every day at the farmers' market.", "18", True),
        ("**Answer: 18**", "18", True),
        ("The temperature is –5.", "-5", True),
        ("The answer is 18 (not 17).", "18", False),
    ],
)
def test_gsm8k_reads_numbers_as_they_are_meant(text: str, gold: str, right: bool) -> None:
    assert grade_gsm8k(text, gold).score == float(right)


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("It is not $17$.", "17", False),
        ("Either $17$ or $18$ works.", "17", False),
        ("Hence $x > 5$.", "5", False),
        ("The answer is $5$ or more.", "5", False),
        ("From $a=1$ and $b=2$ we get $a+b=3$.", "3", True),
        (r"Thus \[ x = 5 \]", "5", True),
        ("The answer is $5$ cm.", "5", True),
        ("We have $x=3$. The answer is 5.", "5", True),
        ("We have $x=3$. The answer is 5.", "3", False),
        ("We have $x=3$. The answer is Monday.", "3", False),
        ("The roots are $1$ and $2$.", "2", False),
    ],
)
def test_accuracy_reads_the_last_formula_alone(text: str, gold: str, right: bool) -> None:
    assert accuracy.call([text], {"solution": [gold]}) == [float(right)]


def test_what_sympy_cannot_rebuild_is_wrong_and_no_error() -> None:
    found = values(PLACES[0] % r"(2,12) \cup (12102.5)", r"(2,12) \cup (12,102)")
    assert set(found.values()) == {0.0}


PAIRS = Path(__file__).with_name("hand_graded.jsonl")
# the pairs that a reward reads, and on how many of them it says what a reader by hand says
AGREEMENT = {
    "accuracy": (326, 310),
    "fast": (223, 216),
    "math_verify": (223, 219),
    "gsm8k": (95, 94),
}


def test_agreement_with_a_reader_by_hand() -> None:
    """Whoever gives a 1 to an answer that the reader by hand calls wrong fails; docs/rewards.md has the rest."""
    seen: dict[str, list[int]] = {name: [0, 0] for name in AGREEMENT}
    for line in PAIRS.read_text(encoding="utf-8").splitlines():
        pair = json.loads(line)
        for name, value in values(pair["text"], pair["gold"]).items():
            if name in ("accuracy", "gsm8k") or "\\boxed" in pair["text"]:
                assert value == pair["right"] or value == 0.0, (name, pair)
                seen[name][0] += 1
                seen[name][1] += value == pair["right"]
    assert {name: tuple(counts) for name, counts in seen.items()} == AGREEMENT
