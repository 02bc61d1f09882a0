"""The GSM8K and math graders: the known expectations, the evaluation sets, hostile text; and the rewards over them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from swift_r1.rewards.graders import Grade, grade_gsm8k, grade_math, library
from swift_r1.rewards.graders.answers import tidied
from swift_r1.rewards.orm import build_reward

DATA = Path(os.environ.get("SWIFT_R1_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
SETS = ("aime24", "amc23", "math500", "minerva", "olympiad_bench")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}: set SWIFT_R1_DATA")


def boxed(answer: object) -> str:
    return f"Hence \\boxed{{{answer}}}"


@pytest.mark.parametrize(
    ("answer", "gold", "fast", "library"),
    [
        ("25", "025", 1, 1),
        (r"\frac{2}{4}", r"\frac{1}{2}", 0, 1),
        ("0.25", r"\frac14", 1, 1),
        (r"12,\!345", "12345", 1, 1),
        ("[1,2)", "(1,2)", 0, 0),
        ("xyz=5", "5", 0, 1),
        (r"50\%", "0.5", 0, 1),
        (r"5\text{ cm}^2", "5", 1, 1),
        ("2, 3", "3, 2", 0, 1),
        ("2^{10}", "1024", 0, 1),
        ("7", ["6", "7"], 1, 1),
    ],
)
def test_known_expectations(answer: str, gold: object, fast: int, library: int) -> None:
    assert grade_math(boxed(answer), gold) == Grade(float(fast), True)
    assert grade_math(boxed(answer), gold, "math_verify") == Grade(float(library), True)


@pytest.mark.parametrize("verifier", ["fast", "math_verify"])
def test_an_open_box_is_no_answer(verifier: str) -> None:
    assert grade_math(r"\boxed{4} and \boxed{unclosed", "4", verifier) == Grade(0.0, False)
    assert grade_math("4", "4", verifier) == Grade(0.0, False)
    assert grade_math(r"\boxed{1} then \boxed{\{4\}}", r"\{4\}", verifier) == Grade(1.0, True)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("(x+1)^2", "x^2+2x+1", True),
        (r"\frac1{\sqrt2}", r"\frac{\sqrt{2}}{2}", True),
        ("0.333333333333333333333", r"\frac13", False),
        (r"\sqrt{4}", "2", False),  # a whole number is to be written as one
        (r"3 \times 10^{8}", "300000000", True),
        ("142", 142.0, True),
        ("x=5", "5", True),
        ("y=5", "x=5", False),
        (r"5\text{ cm}", r"5\text{ m}", False),
        (r"90", r"90^\circ", True),
        ("E", r"\text{(E)}", True),
        (r"\{3,2\}", r"\{2,3\}", True),
        ("(2,3)", "2,3", False),
        (r"(1,2) \cup (3,4)", r"(3,4)\cup(1,2)", True),
        (r"(-\infty,3]", r"(-\infty,3)", False),
        (r"3 - 2\sqrt2 , 3 + 2\sqrt 2", r"3 + 2\sqrt2, 3 - 2\sqrt2", False),
        (r"2\sqrt{2} \pm 3", r"\pm 3 + \sqrt 8", True),
        ("3", "3 n", False),
        (r"\sqrt{x^2}", "x", False),
        ("2^{1009}+1", "2^{1009}", False),
        (r"2\sin x\cos x", r"\sin 2x", True),
        ("1,011", "1011", True),
        ("10,11", "1011", False),
        (r"$\boxed{5}$", "$5$", True),
        ("", "5", False),
    ],
)
def test_fast(answer: str, gold: object, right: bool) -> None:
    assert grade_math(boxed(answer), gold) == Grade(float(right), True)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        # a space between digits parts two numbers, but for groups of three
        ("2 3", "23", False),
        (r"1\,234 \ 567", "1234567", True),
        ("12 345", "12,345", True),
        (r"\frac 1 2", r"\frac12", True),
        # a choice of signs is both values, in any order
        (r"\pm 3", "3,-3", True),
        (r"\pm 3", "3", False),
        (r"1 \mp \sqrt{19}", r"1 + \sqrt{19}, 1 - \sqrt{19}", True),
        (r"-2, 1+\sqrt5, 1-\sqrt5", r"\{1\pm\sqrt{5},-2\}", True),
        (r"\pm 3 \pm 4", r"\pm 3 \mp 4", False),
        # sets
        (r"\{3, 2\}", "2,3", True),
        (r"\{2, 3\}", "(2,3)", False),
        (r"\{\{2, 3\}, \{4\}\}", r"\{\{4\},\{3,2\}\}", True),
        (r"\{4\}, \{2\}", r"\{2\},\{4\}", False),
        (r"\varnothing", r"\emptyset", True),
        (r"x \in [1,2)", "[1,2)", True),
        (r"x \in [1,2]", "[1,2)", False),
        (r"(3, +\infty)", r"(3,\infty)", True),
        (r"-\infty", r"\infty", False),
        # fonts, braces, words
        (r"\mathbf{5}", "5", True),
        (r"\boldsymbol{\frac{1}{2}}", "0.5", True),
        (r"\mathrm{even}", r"\text{even}", True),
        (r"\text{east.}", r"\text{east}", True),
        (r"1 - \frac{1}{\mathrm{e}}", r"\frac{e-1}{e}", True),
        (r"\text{5 cm}", "5", True),
        (r"5 \text{ million}", "5", False),
        # degrees and units, item by item
        (r"30\degree", r"30^\circ", True),
        (r"\sin 30^\circ", r"\frac12", True),
        ("90, 60", r"90^{\circ}, 60^{\circ}", True),
        (r"30\text{ mph}, 40\text{ mph}", r"30, 40 \text{ km}", False),
        # names
        ("x = 1, x = -2", "1,-2", True),
        ("(x, y) = (5, 8)", "(5,8)", True),
        (r"\theta = \frac{\pi}{2}", r"\frac{\pi}{2}", True),
        (r"x \approx 8.7", "8.7", True),
        # relations
        (r"3 < x", "x > 3", True),
        ("k <= 2", r"k \leqslant 2", True),
        (r"3 > x", "x > 3", False),
        ("2x + 3 = y", "y = 2x+3", True),
        # escaped once too often
        (r"\\frac{3}{4}", r"\frac34", True),
        (r"\lfloor\frac{3 n-1}{5}\rfloor", r"\lfloor\frac{2 n-1}{5}\rfloor", False),
        (r"\lfloor 1 + n / 2\rfloor", r"\lfloor\frac{n}{2}\rfloor + 1", True),
    ],
)
def test_fast_on_answers_as_models_write_them(answer: str, gold: str, right: bool) -> None:
    assert grade_math(boxed(answer), gold) == Grade(float(right), True)


MATRIX = r"\begin{pmatrix} -1/3 & 0 \\ 2 & 5 \end{pmatrix}"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (r"\begin{pmatrix}-1/3&0\\2&5\end{pmatrix}", True),
        (r"\begin{pmatrix} -1/3 & 0 \\ 2 & 5 \\ \end{pmatrix}", True),
        (r"\begin{pmatrix} -\frac{1}{3} & 0 \\[4pt] 2 & 5 \end{pmatrix}", True),
        (r"\begin{bmatrix} -1/3 & 0 \\ 2 & 5 \end{bmatrix}", True),
        (r"\left(\begin{array}{cc} -1/3 & 0 \\ 2 & 5 \end{array}\right)", True),
        (r"\begin{vmatrix} -1/3 & 0 \\ 2 & 5 \end{vmatrix}", False),
        (r"\begin{pmatrix} -1/3 & 0 & 2 & 5 \end{pmatrix}", False),
        (r"\begin{pmatrix} -1/3 & 2 \\ 0 & 5 \end{pmatrix}", False),
        (r"\begin{pmatrix} -1/3 & 0 \\ 2 & 6 \end{pmatrix}", False),
    ],
)
def test_matrices(answer: str, right: bool) -> None:
    assert grade_math(boxed(answer), MATRIX) == Grade(float(right), True)


def test_a_line_break_before_a_space_stays_one() -> None:
    assert tidied(r"1 \\ 2 \\\, 3 \\[2pt] 4") == r"1 \\ 2 \\ 3 \\ 4"
    spaced = MATRIX.replace(" ", "  ")
    assert grade_math(boxed(spaced), MATRIX.replace(" ", ""), "math_verify") == Grade(1.0, True)


@pytest.mark.parametrize(
    ("text", "tag", "strict"),
    [
        ("<think>a</think> <answer>7</answer>", Grade(1.0, True), Grade(1.0, True)),
        (r"<think>a</think> <answer>so \boxed{7}</answer>", Grade(1.0, True), Grade(1.0, True)),
        ("<think>a</think>\n<answer>7</answer>", Grade(1.0, True), Grade(0.0, False)),
        ("<answer>7</answer>", Grade(1.0, True), Grade(0.0, False)),
        ("</think> <answer>6</answer> <answer>7</answer>", Grade(1.0, True), Grade(1.0, True)),
        ("</think> <answer>7", Grade(0.0, False), Grade(0.0, False)),
        (r"</think> <answer>\boxed{7</answer>", Grade(0.0, False), Grade(0.0, False)),
        (r"\boxed{7}", Grade(0.0, False), Grade(0.0, False)),
    ],
)
def test_answer_tags(text: str, tag: Grade, strict: Grade) -> None:
    assert grade_math(text, "7", answer="tag") == tag
    assert grade_math(text, "7", answer="tag_strict") == strict


def test_bad_arguments_are_errors() -> None:
    for call in (
        lambda: grade_math("x", "5", verifier="slow"),
        lambda: grade_math("x", "5", answer="tags"),
        lambda: grade_math("x", []),
        lambda: grade_math("x", None),
        lambda: grade_math("x", " "),
        lambda: grade_gsm8k("x", "many"),
        lambda: grade_gsm8k("x", "5", mode="fast"),
    ):
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\{1, 2\}", "(1, 2)", False),
        ("[1, 2]", "(1, 2)", False),
        (r"2, 1", r"\{1, 2\}", True),
        (r"5\text{ g}", r"5\text{ kg}", False),
        ("5", r"5\text{ kg}", True),
        (r"6\text{ million}", "6", False),
        ("a", "A", False),
        (r"\text{East}", "east", True),
        ("2xy", "2yx", True),
        (r"2 \times k", "2k", True),
        (r"45^\circ", "45 degrees", True),
        ("(x, y) = (1, 2)", "(1, 2)", True),
    ],
)
def test_what_the_library_drops_counts(answer: str, gold: str, right: bool) -> None:
    assert grade_math(boxed(answer), gold, "math_verify").score == float(right)


def _items() -> list:
    return [
        json.loads(line)["answer"]
        for name in SETS
        for line in (DATA / "math_eval" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


# Neighbours in the sets whose answers differ as text and not in value.
EQUAL_NEIGHBOURS = {
    ("5", "x=5"),
    ("100p^{\\frac{1}{2}}\n", "100p^{\\frac{1}{2}}\n"),
    ("100 p^{\\frac{1}{2}}\n", "100p^{\\frac{1}{2}}\n"),
}


@needs_data
@pytest.mark.data
@pytest.mark.parametrize(
    ("verifier", "every"),
    [("fast", 1), ("math_verify", 40), pytest.param("math_verify", 1, marks=pytest.mark.long)],
)
def test_every_gold_answer_of_the_evaluation_sets(verifier: str, every: int) -> None:
    """1 against itself; 0 against the next item's, where that is another value. `math_verify` takes 12 ms for each."""
    items = _items()
    assert len(items) == 1560
    items = items[::every]
    differing = 0
    for item, following in zip(items, items[1:] + items[:1], strict=True):
        accepted, others = (x if isinstance(x, list) else [x] for x in (item, following))
        for answer in accepted:
            assert grade_math(boxed(answer), item, verifier) == Grade(1.0, True), answer
            equal = any(str(answer).strip("$\n") == str(other).strip("$\n") for other in others)
            equal = equal or any((answer, other) in EQUAL_NEIGHBOURS for other in others)
            assert grade_math(boxed(answer), following, verifier).score == float(equal), (
                answer,
                following,
            )
            differing += not equal
    assert differing > len(items)


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("It costs $18.00", "18", True),
        ("it is 18.", 18, True),
        ("<answer>1,234 dollars</answer>", "1234", True),
        ("it is 25%", "25", True),
        ("<answer>5 m^2</answer>", 5, True),
        ("#### 5\nand 7 more words", "5", True),
        (r"\boxed{1{,}234}", "1,234", True),
        ("a loss: -$5", "-5", True),
        ("10-5", "5", False),
        ("0.1 + 0.2 = 0.3", 0.3, True),
        ("0.30000000000000004", 0.3, False),
        (r"<answer>$\frac{1}{2}$</answer>", "0.5", True),
        ("<answer>3 + 4 = 7</answer>", "7", True),
        ("<answer>6</answer> or 7", "7", False),
        ("1,23", "123", False),
        ("nothing", "0", False),
        ("<answer></answer> 7", "7", False),
        ("9" * 5000, "9", False),
        ("1/0", "1", False),
        ("<answer>7 or 8</answer>", 7, False),
        (r"\boxed{7\text{ or eight}}", 7, False),
        ("so 7 or $8.", 8, False),
        ("#### 7 8", 7, False),
        (r"\boxed{7-8}", 7, False),
        (r"\boxed{10^3}", 10, False),
        (r"\boxed{2\sqrt{3}}", 2, False),
        (r"\boxed{1,000 + 2 = 1,002\text{ cm}^2}", 1002, True),
        (r"\boxed{18^\circ}", 18, True),
        ("#### 18", "9 * 2 = <<9*2=18>>18\n#### 18", True),
        ("#### 9", "9 * 2 = <<9*2=18>>18\n#### 18", False),
    ],
)
def test_gsm8k_numbers(text: str, gold: object, right: bool) -> None:
    assert grade_gsm8k(text, gold).score == float(right)


def test_gsm8k_modes() -> None:
    assert grade_gsm8k("first 7, then 1,234", "1234", "oat") == Grade(1.0, True)
    assert grade_gsm8k("18.00", "18", "oat") == Grade(0.0, True)
    assert grade_gsm8k("none", "18", "oat") == Grade(0.0, False)
    text = "<answer> 1,234 </answer> <answer>5</answer>"
    assert grade_gsm8k(text, "1234", "r1rl") == Grade(1.0, True)
    assert grade_gsm8k(text, "1,234", "r1rl") == Grade(0.0, True)
    assert grade_gsm8k(text, "1,234", "r1rl", strip_gold=True) == Grade(1.0, True)
    assert grade_gsm8k("1234", "1234", "r1rl") == Grade(0.0, False)
    assert grade_gsm8k("so 18", "18").formatted is False
    assert grade_gsm8k("#### 18", "18").formatted is True


@needs_data
@pytest.mark.data
def test_gsm8k_solutions_are_right() -> None:
    for line in (DATA / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert grade_gsm8k(row["solution"], row["answer"]) == Grade(1.0, True)
        assert grade_gsm8k(f"The answer is {row['answer']}.", row["solution"]).score == 1.0


BOMBS = [
    "9^{9^{9^{9}}}",
    "(((9^{999})^{999})^{999})^{999}",
    "100000000!",
    "(300!)!",
    "{" * 300 + "1" + "}" * 300,
    "-" * 399 + "1",
    r"\sqrt" * 70 + "2",
    r"\sin" * 90 + "x",
    r"\exp(\exp(\exp(\exp(9))))",
    "|" * 300 + "1",
    "1e999999",
    "9" * 5000,
    ",".join("1" * 900),
    r"\binom{300}{150}" * 20,
    "__import__('os').system('true')",
    r"\cup" * 90,
    r"\{" + ",".join(rf"\{{{n}+\sqrt{{{n}}},{n}\}}" for n in range(24)) + r"\}",
    r"\{" + ",".join(rf"x_{n} \pm {n}" for n in range(90)) + r"\}",
    r"\begin{pmatrix} 1" + " & 1" * 300 + r"\end{pmatrix}",
    r"\lfloor x^{99} \rfloor" * 15,
    "1/0",
    "0^{-1}",
    r"\tan(\pi/2)",
    "\x00\ud800",
]


@pytest.mark.parametrize(
    "bomb", BOMBS, ids=lambda text: text[:20].encode("unicode_escape").decode()
)
def test_bombs_are_wrong_at_once(bomb: str) -> None:
    started = time.process_time()
    for gold in ("5", "x^2", "(1,2)", r"\{1,2\}"):
        assert grade_math(boxed(bomb), gold).score == 0.0
        assert grade_gsm8k(bomb, "5").score in (0.0, 1.0)
    assert time.process_time() - started < 0.5
    assert grade_math(boxed(bomb), "5", "math_verify").score == 0.0
    assert time.process_time() - started < 11  # the library has a time-out of its own


def test_rewards_over_the_graders() -> None:
    columns = {"nums": [[1, 2, 3], ["1", "2", "3"]], "target": [9, "6"], "solution": ["6", "9"]}
    texts = ["<answer>(1 + 2) * 3</answer>", r"<answer>9</answer> \boxed{9}"]
    assert build_reward("countdown").needs == ("nums", "target")
    assert build_reward("countdown").call(texts, columns) == [1.0, 0.0]
    for name in ("gsm8k", "math", "accuracy"):
        assert build_reward(name).needs == ("solution",)
    assert build_reward("gsm8k").call(texts, columns) == [0.0, 1.0]
    assert build_reward("math").call(texts, columns) == [0.0, 1.0]
    assert build_reward("accuracy").call(texts, columns) == [0.0, 1.0]


WORKED = [  # text with working, and its gold answer
    (r"Since $x^2 - 4x + 3 = (x-1)(x-3)$, both powers $x^2$ and $3^2$ fit. So \boxed{3}", "3"),
    (r"By Pythagoras $c^2 = a^2 - b^2 = 5^2 - 3^2$, hence $c = \boxed{4}$.", "4"),
    (r"We have $2^3 \cdot 2^4 = 2^{3+4} = 128$. The answer is $\boxed{128}$.", "128"),
    (r"As $5!! = 5 \cdot 3$, and $100!$ has 24 zeros, we get \boxed{15}.", "15"),
    (r"The last digit of $2^{2023}$ is that of $2^3$: $\boxed{8}$", "8"),
    (r"Not $9^{9^{9^9}}$ and not $(1000!)!$, but \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"$$\frac{x^2}{y^2} \cdot y^2$$ leaves \[ \boxed{x^2} \]", "x^2"),
    (r"So $a^2b^2 = (ab)^2$ and the answer is $\boxed{a^2b^2}$.", "(ab)^2"),
]


def test_the_working_before_the_answer_does_not_matter() -> None:
    texts, golds = zip(*WORKED, strict=True)
    assert (
        build_reward("accuracy").call(list(texts), {"solution": [f"${gold}$" for gold in golds]})
        == [1.0] * 8
    )
    assert build_reward("accuracy").call(list(texts), {"solution": ["$7$"] * 8}) == [0.0] * 8
    for verifier in ("fast", "math_verify"):
        assert [grade_math(text, gold, verifier).score for text, gold in WORKED] == [1.0] * 8, (
            verifier
        )


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\left(\frac{x}{y}\right)^2", r"\frac{x^2}{y^2}"),
        (r"-y^2 + x^2", "x^2-y^2"),
        (r"\frac{59049}{32}", r"\frac{3^{10}}{2^5}"),
        (r"2 \cdot 2^{2022}", "2^{2023}"),
        (r"x^{2023} + 1", "1 + x^{2023}"),
        (r"2^{2^{3}}", "256"),
        (r"\frac{100!}{98!}", "9900"),
    ],
)
def test_the_library_sees_ordinary_powers(answer: str, gold: str) -> None:
    assert grade_math(boxed(answer), gold, "math_verify") == Grade(1.0, True)


def test_the_library_says_nothing_about_its_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "LIBRARY_SECONDS", 1)
    started = time.monotonic()
    assert grade_math(boxed(r"\binom{1000000}{500000}"), "5", "math_verify") == Grade(0.0, True)
    assert time.monotonic() - started > 0.9 and not caplog.records


ANSWERS = (r"\boxed{%s}", "So the answer is $%s$.", "<answer>%s</answer>", "<answer>$%s$</answer>")


@pytest.mark.parametrize(
    "gold",
    [
        *(
            "x^6",
            r"\sqrt{2}",
            r"(3,\frac{\pi}{2})",
            r"\dfrac{1}{2}",
            r"\text{Monday}",
            "[0,1)",
            "p - q",
            r"2\pi",
            "3x+2",
        ),
        *("10^{-3}", "B", r"\text{(B)}", "1,234", "0.5", "18"),
    ],
)
def test_accuracy_reads_golds_as_people_store_them(gold: str) -> None:
    texts = [answer % gold for answer in ANSWERS] + [r"\boxed{2}"]
    assert build_reward("accuracy").call(texts, {"solution": [gold] * 5}) == [1.0] * 4 + [0.0]


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        ("<answer>Tuesday</answer>", "Monday", 0.0),
        ("<answer>monday</answer>", r"\text{Monday}", 1.0),
        ("<answer>B</answer>", "(B)", 1.0),
        (r"<answer>2\pi</answer>", "2", 0.0),
        ("<answer>The total is 18 dollars</answer>", "18", 1.0),
        (r"\boxed{5\text{ g}}", r"5\text{ kg}", 0.0),
        (r"\boxed{(1, 2)}", r"\{1, 2\}", 0.0),
        (r"\boxed{18}", ["17", "18"], 1.0),
        (r"\boxed{18}", 18, 1.0),
        (r"\boxed{18}", "As $9 * 2 = 18$, it is \\boxed{18}.", 1.0),
        ("First 9, then twice that.\nThe answer is 18.", "18", 1.0),
        ("The answer is **18.**", "$18$", 1.0),
        ("So what is asked is 36/2", "18", 1.0),
        ("The answer is $18 dollars.", "18", 1.0),
        ("The answer is Monday.", r"\text{Monday}", 1.0),
        ("The answer is 17 or 18.", "18", 0.0),
        ("The answer is 17. Or 18.", "18", 0.0),
        ("The answer is 18. No, it is 17.", "18", 0.0),
        ("The answer is not 18.", "18", 0.0),
        ("The answer is at least 18.", "18", 0.0),
        ("Which is 17 18", "18", 0.0),
        ("18", "18", 0.0),
        (r"\boxed{18}", None, None),
        (r"\boxed{18}", [], None),
    ],
)
def test_accuracy_of_texts_lists_and_units(text: str, gold: object, value: float | None) -> None:
    assert build_reward("accuracy").call([text], {"solution": [gold]}) == [value]


# No single answer, and one with a dollar too many.
UNREADABLE = {
    "$f(x)=a x+b$, where $b$ is an arbitrary integer, and $a$ is an arbitrary positive integer with $\\mho(a)=0$",
    "$221,$8$",
}


@needs_data
@pytest.mark.data
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.long)])
def test_accuracy_of_every_gold_answer_of_the_evaluation_sets(every: int) -> None:
    accuracy = build_reward("accuracy")
    for item in _items()[::every]:
        gold = str(int(item)) if isinstance(item, float) else item
        for answer in gold if isinstance(gold, list) else [gold]:
            plain = answer.strip().strip("$")
            texts = [boxed(answer.strip()), f"So the answer is ${plain}$."]
            texts += [f"So the answer is {plain}."] if "$" not in plain else []
            if answer.strip() not in UNREADABLE:
                assert set(accuracy.call(texts, {"solution": [gold] * len(texts)})) == {1.0}, answer


def test_accuracy_is_math_verify_and_has_no_opinion_without_a_gold_answer() -> None:
    texts = [
        r"so \boxed{\frac{2}{4}}",
        r"<answer>$2^{10}$</answer>",
        "no box",
        r"\boxed{9^{9^{9}}}",
        "5",
    ]
    solutions = [r"$\frac{1}{2}$", "<answer>$1024$</answer>", "$3$", "$3$", ""]
    assert build_reward("accuracy").call(texts, {"solution": solutions}) == [
        1.0,
        1.0,
        0.0,
        0.0,
        None,
    ]
