"""Questions with answers, of which the answers are learned."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from swift_r1.data.conversations import ConversationEncoder
from swift_r1.data.experts import load_answers
from swift_r1.data.sources import DataFlags
from swift_r1.errors import UsageError
from swift_r1.models.loading import load_tokenizer

ROWS = [
    {
        "messages": [
            {"role": "user", "content": "a?"},
            {"role": "assistant", "content": "<think> so"},
        ]
    },
    {"query": "b?", "response": "yes", "solution": "not this"},
    {"instruction": "c?", "input": "", "output": "a much longer answer"},
    {"query": "no answer?"},
    {"messages": [{"role": "user", "content": "d?"}]},
]


def written(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_all_kinds_are_drawn_once_each_pass(tiny_model, tmp_path, caplog) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    encoder = ConversationEncoder(tokenizer, loss_scale="last_round")
    flags = DataFlags(dataset=["unread"], seed=3)
    with caplog.at_level(logging.WARNING):
        answers = load_answers([written(tmp_path / "e.jsonl", ROWS)], flags, encoder)
    assert "2 of 5 rows left out" in caplog.text
    drawn = answers.drawn(0, 3)
    texts = {tokenizer.decode(prompt): tokenizer.decode(answer) for prompt, answer in drawn}
    assert len(texts) == 3
    end = tokenizer.decode([encoder.turn_end])
    assert {text.removesuffix("\n") for text in texts.values()} == {
        one + end for one in ("<think> so", "yes", "a much longer answer")
    }
    assert answers.drawn(1, 4)[:2] == drawn[1:]  # a step's rows depend on their numbers alone
    assert set(answers.drawn(3, 3)) == set(drawn)


def test_long_rows_are_left_out_and_samples_are_taken(tiny_model, tmp_path, caplog) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    path, flags = written(tmp_path / "e.jsonl", ROWS[1:3]), DataFlags(dataset=["unread"])
    encoder = ConversationEncoder(tokenizer, loss_scale="last_round")
    answers = load_answers([path], flags, encoder)
    lengths = sorted(sum(map(len, pair)) for pair in answers.drawn(0, 2))
    short = ConversationEncoder(tokenizer, max_length=lengths[0], loss_scale="last_round")
    with caplog.at_level(logging.WARNING):
        assert len(load_answers([path], flags, short).rows) == 1
    assert "1 of 2 expert rows left out: longer than" in caplog.text
    assert len(load_answers([f"{path}#5"], flags, encoder).rows) == 5
    with pytest.raises(UsageError, match="none of its 1 rows can be used"):
        load_answers([written(tmp_path / "none.jsonl", ROWS[3:4])], flags, encoder)
