"""`--agent_template`: a row's tools in its prompt."""

import json

import pytest

from swift_r1.data import load_dataset
from swift_r1.data.loading import load_rows
from swift_r1.data.sources import DataFlags
from swift_r1.data.tools import with_tools
from swift_r1.rewards.builtin import is_react

ADD = {"name": "add", "description": "Adds two numbers.", "parameters": {"a": {"type": "int"}}}
USER = {"role": "user", "content": "What is 2 + 3?"}


@pytest.mark.parametrize(
    "tools", [[ADD], json.dumps([ADD]), [json.dumps(ADD)], [{"type": "function", "function": ADD}]]
)
def test_tools_are_described_behind_the_system_message(tools):
    system = {"role": "system", "content": "Be brief."}
    for messages, begins in (([USER], "Answer the question"), ([system, USER], "Be brief.\n\nAnswer the question")):
        first, last = with_tools(messages, tools, "react_en")
        assert first["role"] == "system" and first["content"].startswith(begins) and last == USER
        assert 'add: Adds two numbers. Parameters: {"a": {"type": "int"}}' in first["content"]
        assert "one of [add]" in first["content"]


def test_the_form_of_react_grpo_is_what_its_reward_looks_for():
    shown = with_tools([USER], [ADD], "react_grpo")[0]["content"]
    assert is_react(shown[shown.index("<think>") : shown.index("Observation:")])


def test_rows_with_tools_are_trained_with_a_template_and_left_out_without(tmp_path):
    rows = [
        {"query": "q1", "tools": [ADD]},
        {"query": "q2", "tools": []},
        {"query": "q3", "tools": "not JSON"},
        {"query": "q4", "tools": [{"description": "nameless"}]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bare, _ = load_dataset(str(file))
    assert [row["messages"][-1]["content"] for row in bare] == ["q2"]
    found = load_rows(DataFlags([str(file)], agent_template="react_en", dataset_shuffle=False)).train
    assert [[one["role"] for one in row["messages"]] for row in found] == [["system", "user"], ["user"]]
    assert found[0]["tools"] == [ADD]  # a column for the rewards
