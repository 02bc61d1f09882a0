"""Rows of `swift rlhf --rlhf_type dpo`: a chosen answer and a rejected one, however they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_r1.data.loading import load_rows
from swift_r1.data.sources import DataFlags
from swift_r1.errors import UsageError
from tests.vision import picture

ASKED = {"role": "user", "content": "1+1?"}
CHOSEN, REJECTED = ({"role": "assistant", "content": text} for text in "23")
SAME = [
    {"messages": [ASKED, CHOSEN], "rejected_response": "3"},
    {"messages": [ASKED, CHOSEN], "rejected_messages": [ASKED, REJECTED]},
    {"query": "1+1?", "response": "2", "rejected_response": "3"},
    {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
    {"question": "1+1?", "answer": "9", "chosen": "2", "rejected": "3"},
    {"prompt": [ASKED], "chosen": [CHOSEN], "rejected": [REJECTED]},
    {"chosen": [ASKED, CHOSEN], "rejected": [ASKED, REJECTED]},
]


def loaded(folder: Path, row: dict[str, Any], **flags: Any) -> dict[str, Any]:
    file = folder / "pairs.jsonl"
    file.write_text(json.dumps(row) + "\n")
    data = load_rows(DataFlags(dataset=[str(file)], whole=True, pairs=True, strict=True, **flags))
    [found] = data.train
    return dict(found)


@pytest.mark.parametrize("row", SAME)
def test_all_forms_mean_the_same(tmp_path: Path, row: dict[str, Any]) -> None:
    found = loaded(tmp_path, row)
    assert found["messages"] == [ASKED, CHOSEN]
    assert found["rejected_messages"] == [ASKED, REJECTED]
    assert "rejected_response" not in found
    assert all(found[name] == row[name] for name in {"chosen", "rejected"} & row.keys())


def test_a_picture_is_before_both_answers(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    row = {"query": "what?", "response": "a cat", "rejected_response": "a dog"}
    found = loaded(tmp_path, row | {"images": [str(tmp_path / "a.png")]})
    assert found["rejected_messages"][:-1] == found["messages"][:-1]
    assert "<image>" in found["messages"][0]["content"]
    assert found["rejected_messages"][-1]["content"] == "a dog"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [ASKED, CHOSEN]}, "no rejected answer"),
        (SAME[1] | {"rejected_response": "3"}, "both rejected_response and rejected_messages"),
        (SAME[0] | {"rejected_response": "2"}, "the rejected answer is the chosen one"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": [REJECTED]}, "give both in one form"),
        ({"chosen": "2", "rejected": "3"}, "there is no question"),
        (SAME[1] | {"rejected_messages": [ASKED]}, "no answer to learn"),
    ],
)
def test_what_is_wrong_names_the_line(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"pairs.jsonl:1: .*{why}"):
        loaded(tmp_path, row)
