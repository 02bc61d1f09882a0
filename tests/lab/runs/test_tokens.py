"""The token record as it is read."""

from __future__ import annotations

import json

import pytest

from swift_r1.record.token_reader import TokenRecord
from tests.lab.runs.made import VOCABULARY, make_run, recorded, token_ids


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", steps=6)


def test_a_completion_in_each_step_that_trained_on_it(run):
    record = TokenRecord(run)
    assert record.steps() == [1, 2, 3, 4, 5, 6]
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_bytes().splitlines()]
    row = next(row for row in rows if (row["step"], row["group"], row["number"]) == (3, 0, 2))
    found = record.completion(3, row["request_id"], 2)
    assert [one.step for one in found] == [3, 4]
    for one in found:
        made = recorded(row, one.step)
        assert one.token_ids == made["token_ids"]
        assert one.ratios == pytest.approx(made["ratios"])
        assert (one.clipped, one.weight_versions, one.ref_logps) == (
            made["clipped"],
            made["weight_versions"],
            None,
        )
        assert record.text(one.token_ids) == row["completion"] + "<|im_end|>"
        assert record.text(one.prompt_token_ids) == row["prompt"]
    assert [(one.number, one.token_ids) for one in record.completions(5)] == [
        (n, None) for n in range(4)
    ]
    assert record.completion(3, "other", 2) == []
    assert record.problems == []


def test_a_character_over_several_tokens(run):
    record = TokenRecord(run)
    ids = token_ids("a€<answer>\x80")
    pieces = record.pieces(ids)
    assert pieces == ["a", "", "", "€", "<answer>", "", "\x80", "<|im_end|>"]
    assert record.pieces([259, 0xAC, 259, 97, 259, 700, 259]) == [
        "",
        "€",
        "",
        "\ufffda",
        "",
        "\ufffd<700>",
        "\ufffd",
    ]
    assert [record.is_special(one) for one in (258, 257)] == [True, False]
    assert record.pieces([]) == []
    assert b"".join(VOCABULARY[one] for one in ids).decode() == "".join(pieces)


def test_what_is_missing_or_damaged(run, tmp_path):
    none = TokenRecord(tmp_path)
    assert (none.steps(), none.completion(1, "a", 0), none.problems) == ([], [], [])
    tokens = run / "tokens"
    whole = (tokens / "step-000003.parquet").read_bytes()
    (tokens / "step-000003.parquet").write_bytes(whole[:-100])
    (tokens / ".writing-step-000004.parquet").write_bytes(b"half")
    # a run writes it in its first second
    (tokens / "vocabulary.parquet").rename(run / "vocabulary")
    record = TokenRecord(run)
    assert record.completions(3) == []
    [problem] = record.problems
    assert problem.startswith("tokens/step-000003.parquet cannot be read: ")
    assert record.pieces([65]) == ["<65>"]
    (run / "vocabulary").rename(tokens / "vocabulary.parquet")
    assert record.pieces([65]) == ["A"]
    (tokens / "step-000003.parquet").write_bytes(whole)
    assert len(record.completions(3)) == 4
    assert record.problems == []
