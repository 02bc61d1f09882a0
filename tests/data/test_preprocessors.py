"""Columns renamed and rows turned into messages, as ms-swift does."""

from __future__ import annotations

from typing import Any

import pytest

from swift_r1.data import (
    AlpacaPreprocessor,
    AutoPreprocessor,
    MessagesPreprocessor,
    ResponsePreprocessor,
)

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


class Article(ResponsePreprocessor):
    """The published Countdown plugin's way: `target` arrives as `response`."""

    def preprocess(self, row: dict[str, Any]) -> Any:
        target = row.pop("response", None)
        row.update({"target": target, "query": f"Use {row['nums']} to make {target}."})
        return super().preprocess(row)


def test_the_articles_target_is_found() -> None:
    row = {"nums": [1, 2], "target": 3}
    assert Article()(row) == {
        "nums": [1, 2],
        "target": 3,
        "messages": [{"role": "user", "content": "Use [1, 2] to make 3."}],
    }
    assert row == {"nums": [1, 2], "target": 3}, "the source row must not change"


@pytest.mark.parametrize(
    "query", ["query", "prompt", "input", "instruction", "question", "problem", "Question"]
)
@pytest.mark.parametrize(
    "response", ["response", "answer", "output", "target", "targets", "text", "completion"]
)
def test_synonyms(query: str, response: str) -> None:
    assert ResponsePreprocessor()({query: "q", response: "a", "kept": 1}) == {
        query: "q",
        response: "a",
        "kept": 1,
        "messages": [USER, ASSISTANT],
    }


def test_two_columns_for_one_name_stay_as_they_are() -> None:
    row = {"question": "q", "answer": "a", "target": "t"}
    assert ResponsePreprocessor()(row) == row | {"messages": [USER]}


@pytest.mark.parametrize("name", ["solution", "answer", "Answer", "response", "text"])
def test_an_answer_is_kept_for_the_rewards_under_its_own_name(name: str) -> None:
    row = {"problem": "q", name: "a"}
    for preprocessor in (ResponsePreprocessor(), AutoPreprocessor()):
        assert preprocessor(row) == row | {"messages": [USER, ASSISTANT]}


def test_what_a_preprocessor_makes_of_a_column_stays() -> None:
    class Final(ResponsePreprocessor):
        def preprocess(self, row: dict[str, Any]) -> Any:
            return [super().preprocess({**row, "answer": row["response"].rpartition("#### ")[2]})]

    (made,) = Final()({"question": "q", "answer": "1 + 1 = 2 #### 2"})
    assert made["answer"] == "2" and made["question"] == "q"


def test_columns_given_go_first() -> None:
    preprocessor = ResponsePreprocessor(columns={"Stem": "query", "key": "response"})
    assert preprocessor({"stem": "q", "key": "a"}) == {
        "query": "q",
        "response": "a",
        "messages": [USER, ASSISTANT],
    }


def test_system_history_and_lists() -> None:
    row = {"system_prompt": "s", "history": "[['q', 'a']]", "query": "q", "response": ["a", "b"]}
    assert ResponsePreprocessor()(row) == row | {
        "messages": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]
    }


@pytest.mark.parametrize("column", ["prompt", "input", "Question"])
def test_messages_as_the_question(column: str) -> None:
    row = {column: [SYSTEM, USER], "solution": "a", "kept": 1}
    assert AutoPreprocessor()(row) == row | {"messages": [SYSTEM, USER, ASSISTANT]}
    parts = [{"type": "text", "text": "q"}]
    assert ResponsePreprocessor()({column: parts})["messages"] == [
        {"role": "user", "content": parts}
    ]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"instruction": "do", "input": "this", "output": "a"}, "do\nthis"),
        ({"instruction": "do", "input": "", "output": "a"}, "do"),
        ({"instruction": "do", "input": None, "output": "a"}, "do"),
    ],
)
def test_alpaca(row: dict[str, Any], prompt: str) -> None:
    expected = row | {"messages": [{"role": "user", "content": prompt}, ASSISTANT]}
    assert AlpacaPreprocessor()(row) == expected
    assert AutoPreprocessor()(row) == expected


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversation": [{"human": "q", "assistant": "a"}]},
        {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'},
        {"messages": "[{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]"},
    ],
)
def test_conversations(row: dict[str, Any]) -> None:
    for preprocessor in (MessagesPreprocessor(), AutoPreprocessor()):
        asked = row | {"system": "s", "kept": 1}
        assert preprocessor(asked) == asked | {"messages": [SYSTEM, USER, ASSISTANT]}
        assert preprocessor(row) == row | {"messages": [USER, ASSISTANT]}


def test_conversation_with_named_keys() -> None:
    preprocessor = MessagesPreprocessor(
        role_key="who", content_key="what", user_role="me", assistant_role="it"
    )
    row = {"messages": [{"who": "me", "what": "q"}, {"who": "it", "what": "a"}]}
    assert preprocessor(row) == {"messages": [USER, ASSISTANT]}
