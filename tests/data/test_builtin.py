"""The built-in datasets: from files, and their preprocessors on rows as the hubs have them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from swift_r1.data.loading import load_rows
from swift_r1.data.preprocessors import preprocess_row
from swift_r1.data.registry import builtin_datasets
from swift_r1.data.resolve import DATA_FOLDER
from swift_r1.data.sources import DataFlags
from swift_r1.rewards.graders import grade_gsm8k, grade_math

REPO = Path(__file__).parents[2]
DATA = Path(os.environ.get("SWIFT_R1_DATA", REPO / ".." / "shared" / "data"))


def arguments(**given: Any) -> DataFlags:
    """The data flags with their defaults, except those that are given."""
    return DataFlags(**{"eval_limit": 64, **given})


SIZES = {
    "gsm8k": 7473,
    "asdiv": 1788,
    "math500": 500,
    "aime24": 30,
    "amc23": 83,
    "minerva": 272,
    "olympiad_bench": 675,
}


@pytest.mark.data
@pytest.mark.parametrize("name", SIZES)
def test_files_of_the_data_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no data sets in {DATA}")
    monkeypatch.setenv(DATA_FOLDER, str(DATA))
    data = load_rows(arguments(dataset=[name]))
    assert (len(data.train), data.drops.broken) == (SIZES[name], 0)
    grade = grade_gsm8k if name in ("gsm8k", "asdiv") else grade_math
    for row in data.train:
        assert row["dataset"] == name and row["messages"][0]["content"]
        golds = row["solution"] if isinstance(row["solution"], list) else [row["solution"]]
        assert all(isinstance(gold, str) and gold for gold in golds), row
        if name in ("gsm8k", "aime24", "amc23"):
            assert grade(f"so \\boxed{{{golds[0]}}}", row["solution"]).score == 1.0


@pytest.mark.data
def test_the_held_out_rows_of_gsm8k_are_its_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no data sets in {DATA}")
    monkeypatch.setenv(DATA_FOLDER, str(DATA))
    data = load_rows(arguments(dataset=["gsm8k#100"], evaluates=True, eval_limit=2000))
    assert (len(data.train), len(data.eval)) == (100, 1319)
    solutions = {row["prompt_id"]: row["solution"] for row in data.eval}
    assert len(solutions) == 1319 and solutions["gsm8k/eval:0"] == "18"


def test_countdown_without_a_plugin() -> None:
    from swift_r1.data.countdown import countdown_problems

    data = load_rows(arguments(dataset=["countdown#20"], evaluates=True, eval_limit=5))
    assert [row["nums"] for row in data.train] == [
        list(one.nums) for one in countdown_problems(20, 42)
    ]
    assert "Using the numbers [" in data.train[0]["messages"][0]["content"]
    assert len(data.eval) == 5 and data.eval[0]["prompt_id"] == "countdown/eval:0"


HUB_ROWS = [
    ("gsm8k", {"question": "q", "answer": "3+4=<<3+4=7>>7\n#### 1,007"}, "q", "1,007"),
    (
        "asdiv",
        {"body": "B.", "question": "Q?", "answer": "9 (apples)", "formula": "f"},
        "B. Q?",
        "9",
    ),
    ("asdiv", {"body": "B.", "question": "Q?", "answer": "9; 10"}, None, None),
    (
        "math",
        {"problem": "p", "solution": r"so $\boxed{\frac{1}{2}}$", "level": "Level 1"},
        "p",
        r"\frac{1}{2}",
    ),
    (
        "dapo-math",
        {"prompt": "p", "solution": "34", "reward_model": {"ground_truth": "34"}},
        "p",
        "34",
    ),
    (
        "dapo-math",
        {
            "prompt": [{"role": "user", "content": "p"}],
            "reward_model": {"ground_truth": "-1", "style": "rule"},
        },
        "p",
        "-1",
    ),
    ("aime24", {"ID": 60, "Problem": "p", "Solution": "worked", "Answer": 204}, "p", "204"),
    ("amc23", {"question": "p", "answer": 27.0}, "p", "27"),
    (
        "olympiad_bench",
        {"question": "p", "solution": ["worked"], "final_answer": ["2", " 3"]},
        "p",
        ["2", "3"],
    ),
]


@pytest.mark.parametrize(("name", "row", "question", "solution"), HUB_ROWS)
def test_rows_as_the_hubs_have_them(
    name: str, row: dict[str, Any], question: str | None, solution: Any
) -> None:
    before = dict(row)
    result = preprocess_row(builtin_datasets[name].preprocess_func, row)
    assert row == before
    if question is None:
        assert result is None
    else:
        assert isinstance(result, dict)
        assert result["messages"] == [{"role": "user", "content": question}]
        assert result["solution"] == solution


def test_a_row_of_other_columns_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="no problem or no answer among the columns text"):
        preprocess_row(builtin_datasets["gsm8k"].preprocess_func, {"text": "q"})
