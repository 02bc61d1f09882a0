"""Why a completion is not right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.failures import has_answer
from swift_r1.lab.runs.query import CORRECT, FAILURE, CompletionQuery
from tests.lab.runs.made import write_rows

pytest.importorskip("duckdb")

TAGS, BOXED = "Answer in <answer> tags.", "Put it in \\boxed{}."


@pytest.mark.parametrize(
    ("reward", "completion", "prompt", "answered"),
    [
        ("countdown", "<answer>1</answer>", "", True),
        ("countdown", "<answer>1", TAGS, False),
        ("countdown", "\\boxed{1}", BOXED, False),
        ("math", "\\boxed{1}", "", True),
        ("math", "\\boxed{1", BOXED, False),
        ("math", "<answer>1</answer>", TAGS, False),
        ("math_tag", "<answer>1</answer>", "", True),
        ("gsm8k", "It is 12.", "", True),
        ("gsm8k", "It is twelve.", "", False),
        ("external_mine", "It is 12.", "", True),  # how it reads is not known
        ("external_mine", "It is 12.", TAGS, False),
        ("external_mine", "<answer>12</answer>", TAGS, True),
        ("external_mine", "\\boxed{12}", BOXED, True),
        ("external_mine", "", BOXED, False),
        ("", "It is 12.", "", True),
    ],
)
def test_an_answer_is_found_as_the_grader_finds_it(reward, completion, prompt, answered):
    assert has_answer(reward, completion, prompt) is answered


def row(
    reward: float | None = 0.0, text: str = "<answer>1</answer>", reason: str = "stop", **more: Any
) -> dict[str, Any]:
    return {
        "step": 1,
        "prompt": TAGS,
        "completion": text,
        "reward": reward,
        "finish_reason": reason,
    } | more


ROWS = {
    "right": [
        row(1.1, **{"rewards/mine": 1.0, "rewards/format": 0.0}),
        row(1.0, "none", "length", **{"rewards/a/b~c": 2.0}),
        # the first function decides, not the sum
        row(0.0, **{"rewards/mine": 1, "rewards/other": 0.0}),
    ],
    "invalid reward": [row(None, **{"rewards/mine": 1.0}), row(None, "none", "length")],
    "truncated": [row(0.1, reason="length", **{"rewards/mine": 0.0}), row(reason="length")],
    "no answer": [
        row(0.0, "1", **{"rewards/mine": 0.0, "rewards/format": 0.0}),
        row(0.0, "<answer>", "stop"),
    ],
    "wrong format": [
        row(0.0, **{"rewards/mine": 0.0, "rewards/format": 0.0}),
        row(-1.0, **{"rewards/mine": 0.9, "rewards/my_FORMAT_too": -1.0, "rewards/format": None}),
    ],
    "wrong value": [
        row(0.0, **{"rewards/mine": 0.0, "rewards/format": 0.5}),
        row(0.0, **{"rewards/mine": None, "rewards/other": 1.0}),  # no opinion is not right
        row(0.0, **{"rewards/mine": "high"}),
        row(0.0),
    ],
}


def test_the_first_class_that_holds(tmp_path: Path):
    path = tmp_path / "completions.jsonl"
    write_rows(path, (one for rows in ROWS.values() for one in rows))
    with CompletionTable(path) as table:
        table.refresh()
        found = [one[FAILURE] for one in table.page(CompletionQuery())]
        assert found == [name for name, rows in ROWS.items() for _ in rows]
        assert table.failure_classes() == [
            {"step": 1} | {name: len(rows) for name, rows in ROWS.items()}
        ]
        assert table.count(CompletionQuery(where=[(CORRECT, ">=", 1)])) == 4
