"""Questions with answers, of which the answers are learned."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from swift_r1.data.experts import load_answers
from swift_r1.data.prompts import PromptEncoder, Wording
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
    encoder = PromptEncoder(tokenizer, Wording(response_prefix="<think>"))
    flags = DataFlags(dataset=["unread"], seed=3)
    with caplog.at_level(logging.WARNING):
        answers = load_answers([written(tmp_path / "e.jsonl", ROWS)], flags, encoder, 100)
    assert (
        "2 of 5 rows left out" in caplog.text
        and "the last message is not the assistant's" in caplog.text
    )
    drawn = answers.drawn(0, 3)
    texts = {tokenizer.decode(prompt): tokenizer.decode(answer) for prompt, answer in drawn}
    assert len(texts) == 3 and all(prompt.endswith("<think>") for prompt in texts)
    end = tokenizer.decode(
        [encoder.turn_end if encoder.turn_end is not None else tokenizer.eos_token_id]
    )
    assert set(texts.values()) == {" so" + end, "yes" + end, "a much longer answer" + end}
    assert answers.drawn(1, 4)[:2] == drawn[1:]  # a step's rows depend on their numbers alone
    assert set(answers.drawn(3, 3)) == set(drawn)


def test_an_answer_has_all_that_ends_its_turn(tiny_model, tmp_path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{ m.content }}<|im_end|><|im_start|>{%- endfor -%}"
    )
    tokenizer.add_special_tokens({"eos_token": "<|im_start|>"})
    path, flags = written(tmp_path / "e.jsonl", ROWS[1:2]), DataFlags(dataset=["unread"])
    answers = load_answers([path], flags, PromptEncoder(tokenizer), 100)
    [(_, tokens)] = answers.drawn(0, 1)
    assert tokenizer.decode(tokens).endswith("<|im_end|><|im_start|>")


def test_long_answers_are_cut_and_samples_are_taken(tiny_model, tmp_path, caplog) -> None:
    encoder = PromptEncoder(load_tokenizer(str(tiny_model)))
    path, flags = written(tmp_path / "e.jsonl", ROWS[1:3]), DataFlags(dataset=["unread"])
    with caplog.at_level(logging.WARNING):
        lengths = sorted(
            len(answer) for _, answer in load_answers([path], flags, encoder, 5).drawn(0, 2)
        )
    assert (
        lengths == [4, 5]
        and "1 of 2 answers are cut to --max_completion_length 5 tokens" in caplog.text
    )
    assert len(load_answers([f"{path}#5"], flags, encoder, 100).rows) == 5
    with pytest.raises(UsageError, match="none of its 1 rows can be used"):
        load_answers([written(tmp_path / "none.jsonl", ROWS[3:4])], flags, encoder, 100)
