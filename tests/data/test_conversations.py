"""Which tokens of a conversation are learned."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from swift_r1.data.conversations import ConversationEncoder
from swift_r1.data.loading import load_rows
from swift_r1.data.prompts import Wording
from swift_r1.data.sources import DataFlags
from swift_r1.errors import UsageError
from swift_r1.models.loading import load_tokenizer
from tests.data.fixtures.make_ms_swift_rows import FILE, FORMS, stretches, tokenizer_of
from tests.tool_templates import HERMES

# Qwen3's: thinking is rendered in answers behind the user's last message, and left out of those before.
THINKING = (
    "{%- set asked = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set asked.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- set said = m.content.split('</think>')[-1].lstrip('\n') -%}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' -%}"
    "{%- if m.role == 'assistant' and loop.index0 > asked.last -%}{{- '<think>\n' + thought + '\n</think>\n\n' + said -}}"
    "{%- elif m.role == 'assistant' -%}{{- said -}}{%- else -%}{{- m.content -}}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
# R1-Distill's: the prompt opens the thinking, and no answer is rendered with its own.
OPENED = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '<U>' + m.content -}}{%- else -%}"
    "{{- '<A>' + m.content.split('</think>')[-1] + '<|im_end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<A><think>\n' -}}{%- endif -%}"
)
# GLM-4's: the next message's start ends an answer.
BY_NEXT = (
    "{%- for m in messages -%}{{- ('<|im_start|>' if m.role == 'user' else '<A>') + '\n' + m.content -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<A>' -}}{%- endif -%}"
)


def said(role: str, text: str, **more: object) -> dict:
    return {"role": {"u": "user", "a": "assistant", "t": "tool"}[role], "content": text, **more}


TWO = [said("u", "1+1"), said("a", "2"), said("u", "more"), said("a", "3")]


@pytest.fixture
def learned(tiny_model):
    """`learned(messages, template, **arguments)`: of each sequence its text, and the stretches that are learned."""

    def found(messages: list[dict], template: str | None = None, **given) -> list:
        tokenizer = load_tokenizer(str(tiny_model))
        tokenizer.chat_template = template or tokenizer.chat_template
        row = {"messages": messages, "prompt_id": "d:0", "dataset": "d"} | given.pop("row", {})
        encoder = ConversationEncoder(tokenizer, given.pop("wording", None), **given)
        one = encoder.encode(row)
        if one is None:
            return []
        texts = []
        for sequence in one.sequences:
            stretches = [""]
            for token, is_learned in zip(*sequence[:2], strict=True):
                if is_learned:
                    stretches[-1] += tokenizer.decode([token])
                elif stretches[-1]:
                    stretches.append("")
            texts.append((tokenizer.decode(sequence.token_ids), [one for one in stretches if one]))
        return texts

    return found


@pytest.mark.parametrize("name", FORMS)
def test_tokens_and_masks_are_those_of_ms_swift(name: str) -> None:
    """But for one thing: where its templates end an answer with a newline too, it learns that."""
    tokenizer = tokenizer_of(name)
    end = FORMS[name][0][-1]
    for row in json.loads(FILE.read_text())[name]:
        messages = [dict(one) for one in row["messages"]]
        encoder = ConversationEncoder(tokenizer, loss_scale=row["loss_scale"])
        one = encoder.encode({"messages": messages, "prompt_id": "d:0", "dataset": "d"})
        [sequence] = one.sequences
        theirs = "\0".join(row["stretches"]).replace(f"{end}\n\0", f"{end}\0\n")
        theirs = theirs.removesuffix("\n")
        assert stretches(
            tokenizer, list(sequence.token_ids), list(sequence.learned)
        ) == theirs.split("\0")


def test_every_answer_to_the_end_of_its_turn(learned) -> None:
    [(text, stretches)] = learned(TWO)
    assert stretches == ["2<|im_end|>", "3<|im_end|>"]
    assert text == (
        "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    )


def test_what_a_message_or_the_flag_leaves_out(learned) -> None:
    first_not = [TWO[0], said("a", "2", loss=False), *TWO[2:]]
    [(text, stretches)] = learned(first_not)
    assert stretches == ["3<|im_end|>"] and "2<|im_end|>" in text
    assert learned(TWO, loss_scale="last_round") == [(text, stretches)]
    first_too = [TWO[0], said("a", "2", loss=True), *TWO[2:]]
    assert learned(first_too, loss_scale="last_round") == learned(TWO)
    last_not = [*TWO[:3], said("a", "3", loss=False)]
    [(text, stretches)] = learned(last_not)
    assert stretches == ["2<|im_end|>"] and text.endswith("2<|im_end|>")  # no more than that takes
    neither = [*first_not[:3], last_not[3]]
    assert [stretches for _, stretches in learned(neither)] == [[]]
    [(text, [everything])] = learned(neither, loss_scale="all")
    assert text == "<|im_start|>" + everything and text.endswith("3<|im_end|>")


def test_calls_of_tools_are_learned_and_answers_of_tools_are_not(learned) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = [
        said("u", "1+1"),
        said("a", "", tool_calls=[call]),
        said("t", "2"),
        said("a", "It is 2"),
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for scale in ("default", "last_round"):  # the call is behind the user's last message too
        [(text, stretches)] = learned(asked, HERMES, loss_scale=scale, row={"tools": tools})
        called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
        assert stretches == [called, "It is 2<|im_end|>"]
        assert "<tools>" in text and "<tool_response>\n2" in text


def test_a_template_that_rewrites_earlier_answers(learned) -> None:
    """Each answer stands behind the prompt that the model would have had, in a sequence of its own."""
    thought = [TWO[0], said("a", "<think>a</think>2"), TWO[2], said("a", "<think>b</think>3")]
    head = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    first = "<think>\na\n</think>\n\n2<|im_end|>"
    second = "<think>\nb\n</think>\n\n3<|im_end|>"
    middle = "2<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert learned(thought, THINKING) == [
        (head + first, [first]),
        (head + middle + second, [second]),
    ]
    assert learned(thought, THINKING, loss_scale="last_round") == [
        (head + middle + second, [second])
    ]
    thought = [TWO[0], said("a", "<think>\na</think>2"), TWO[2], said("a", "<think>\nb</think>3")]
    assert learned(thought, OPENED) == [
        ("<U>1+1<A><think>\na</think>2<|im_end|>", ["a</think>2<|im_end|>"]),
        ("<U>1+1<A>2<|im_end|><U>more<A><think>\nb</think>3<|im_end|>", ["b</think>3<|im_end|>"]),
    ]


def test_an_answer_that_the_next_message_ends(learned) -> None:
    assert [stretches for _, stretches in learned(TWO, BY_NEXT)] == [
        ["\n2<|im_start|>", "\n3<|im_start|>"]
    ]


def test_a_prefix_that_begins_every_answer(learned) -> None:
    wording = Wording(response_prefix="<think>")
    [(text, stretches)] = learned([TWO[0], said("a", "<think> so")], wording=wording)
    assert stretches == [" so<|im_end|>"] and text.endswith("assistant\n<think> so<|im_end|>")


def test_rows_that_are_too_long(learned) -> None:
    [(text, _)] = learned(TWO)
    size = len(learned(TWO[:2])[0][0].replace("<|im_start|>", "s").replace("<|im_end|>", "e"))
    assert learned(TWO, max_length=size) == []
    [(cut, stretches)] = learned(TWO, max_length=size, truncation="right")
    assert text.startswith(cut) and stretches == ["2<|im_end|>"]
    [(cut, stretches)] = learned(TWO, max_length=2, truncation="left")
    assert cut == "3<|im_end|>" and stretches == ["<|im_end|>"]  # nothing predicts the first token
    assert learned(TWO, max_length=200) == learned(TWO)


def test_calls_that_a_template_leaves_out(learned) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    dropped = "{# tools #}" + OPENED
    with pytest.raises(UsageError, match="does not render the tool calls"):
        learned([said("u", "?"), said("a", "", tool_calls=[call])], dropped)


def test_rows_keep_their_answers(tmp_path: Path, caplog) -> None:
    rows = [
        {"messages": [*TWO[:3], said("a", "3", loss=False), said("u", "nobody answers")]},
        {"query": "b?", "response": "yes"},
        {"messages": [said("u", "no answer")]},
        {"messages": [said("a", "first")]},
        {"messages": [said("u", "1"), said("a", "2", loss=0.5)]},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level(logging.WARNING):
        found = load_rows(DataFlags(dataset=[str(path)], whole=True)).train
    assert [row["messages"] for row in found] == [
        [*TWO[:3], said("a", "3", loss=False)],
        [said("u", "b?"), said("a", "yes")],
    ]
    for fault in ("no answer to learn", "there is no question", "loss of a message must be true"):
        assert fault in caplog.text
    prompts = load_rows(DataFlags(dataset=[str(path)])).train  # of the same file, kept apart
    assert prompts[1]["messages"] == [said("u", "b?")]
