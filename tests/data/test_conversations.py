"""Which tokens of a conversation are learned."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from swift_r1.data.conversations import LOSS_SCALES, ConversationEncoder
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


_TURNS = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>"
)
_CALLS = (
    "{%- for c in m.tool_calls or [] -%}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{%- endfor -%}"
)
_TOOLS = "{%- if tools -%}{{ tools | tojson }}{%- endif -%}"
_OPEN = "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
# Phi-3: `eos_token` stands at the end of text in which no answer is asked for
EOS_AT_THE_END = _TURNS + "{%- else -%}{{ '\n' + eos_token }}{%- endif -%}"
# Cohere 2
TWO_ENDS = _TURNS.replace("<|end|>", "<|end|><|turn_end|>") + "{%- endif -%}"
# it always opens the next turn
OPENS_ALWAYS = "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}{{ '<|im_end|>\n' }}{%- endfor -%}<|assistant|>"
# GLM-4.5
BY_NEXT_ROLE = (
    _TOOLS
    + "{%- for m in messages -%}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    + _CALLS
    + "{%- endfor -%}"
    + _OPEN
)
# gpt-oss: channels, an answer that ends otherwise where nothing follows, and no thoughts behind a later answer
CHANNELS = (
    _TOOLS + "{%- set last = messages[-1].role == 'assistant' and not messages[-1].tool_calls -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- if m.thinking and (loop.last or not last) -%}<|assistant|><|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{%- endif -%}{%- if m.tool_calls -%}<|assistant|>"
    + _CALLS
    + "<|call|>{%- else -%}<|assistant|><|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- endif -%}"
    "{%- else -%}<|{{ m.role }}|><|message|>{{ m.content }}<|end|>{%- endif -%}{%- endfor -%}"
    + _OPEN
)
# Gemma 4: an empty thought stands in the prompt alone
EMPTY_THOUGHT = _TURNS + "<|channel>thought\n<channel|>{%- endif -%}"
# R1-Distill
OPENS_A_THOUGHT = _TURNS + "{{ '<think>\n' }}{%- endif -%}"
# LFM2
DROPS_CALLS = _TOOLS + _TURNS + "{%- endif -%}"
DROPS_THE_SECOND = BY_NEXT_ROLE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
DROPS_ITS_TEXT = (
    _TOOLS
    + "{%- for m in messages -%}<|{{ m.role }}|>{%- if m.tool_calls -%}"
    + _CALLS
    + "{%- else -%}{{ m.content }}{%- endif -%}<|end|>{%- endfor -%}"
    + _OPEN
)

CALL = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLS = [said("u", "?"), said("a", "I ask", tool_calls=[CALL]), said("t", "4"), said("a", "4!")]
TWICE = [said("u", "?"), said("a", "I ask", tool_calls=[CALL, {**CALL, "id": "call00002"}])]
THOUGHT = [
    said("u", "?"),
    said("a", "", reasoning_content="hm", tool_calls=[CALL]),
    said("t", "4"),
    said("a", "4!", reasoning_content="oh"),
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture
def encoder_of(tiny_model):
    def made(template: str, **given) -> ConversationEncoder:
        tokenizer = load_tokenizer(str(tiny_model))
        special = [*re.findall(r"<\|\w+\|>", template), "<|user|>", "<|tool|>", "<|observation|>"]
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        tokenizer.chat_template = template
        return ConversationEncoder(tokenizer, **given)

    return made


@pytest.mark.parametrize(
    ("template", "messages", "wanted"),
    [
        (EOS_AT_THE_END, TWO, ["2<|end|>", "3<|end|>"]),
        (TWO_ENDS, TWO, ["2<|end|><|turn_end|>", "3<|end|><|turn_end|>"]),
        (OPENS_ALWAYS, TWO, ["2<|im_end|>", "3<|im_end|>"]),
        (BY_NEXT_ROLE, TWO, ["\n2<|user|>", "\n3<|user|>"]),
        (BY_NEXT_ROLE, CALLS, ['\nI ask[f {"a": 1}]<|observation|>', "\n4!<|user|>"]),
        (
            CHANNELS,
            TWO,
            [f"<|channel|>final<|message|>{number}<|return|>" for number in (2, 3)],
        ),
        (
            CHANNELS,
            THOUGHT,
            [
                '<|channel|>analysis<|message|>hm<|end|><|assistant|>[f {"a": 1}]<|call|>',
                "<|channel|>analysis<|message|>oh<|end|><|assistant|><|channel|>final<|message|>4!<|return|>",
            ],
        ),
        (EMPTY_THOUGHT, TWO, ["2<|end|>", "3<|end|>"]),
        (
            OPENS_A_THOUGHT,
            [TWO[0], said("a", "<think>a</think>2"), TWO[2], said("a", "<think>\nb</think>3")],
            ["a</think>2<|end|>", "b</think>3<|end|>"],
        ),
    ],
)
def test_an_answer_ends_where_the_engine_stops(encoder_of, template, messages, wanted) -> None:
    encoder = encoder_of(template)
    tools = TOOLS if any("tool_calls" in one for one in messages) else []
    row = {"messages": messages, "prompt_id": "d:0", "dataset": "d", "tools": tools}
    taught = []
    for sequence in encoder.sequences(row):
        parts = [""]
        for token, learned in zip(sequence.token_ids, sequence.learned, strict=True):
            if learned:
                parts[-1] += encoder.tokenizer.decode([token])
            elif parts[-1]:
                parts.append("")
        taught += filter(None, parts)
    assert taught == wanted
    stops = {encoder.turn_end, encoder.call_end}
    ends = [encoder.tokenizer(one, add_special_tokens=False)["input_ids"][-1] for one in taught]
    assert stops.issuperset(ends)
    # all at once ends in the same way
    [whole] = encoder_of(template, loss_scale="all").sequences(row)
    assert whole.token_ids[-1] == ends[-1]


@pytest.mark.parametrize(
    ("template", "messages", "why", "scales"),
    [
        (DROPS_CALLS, CALLS, "does not render the tool calls", LOSS_SCALES),
        (DROPS_THE_SECOND, TWICE, "does not render the tool calls", LOSS_SCALES),
        (DROPS_ITS_TEXT, CALLS, "does not render the text", LOSS_SCALES),
        (BY_NEXT_ROLE, THOUGHT, "does not render the reasoning_content", LOSS_SCALES),
        (OPENS_A_THOUGHT, [TWO[0], THOUGHT[3]], "does not render the reasoning", LOSS_SCALES),
        (OPENS_A_THOUGHT, TWO, "the prompt opens a thought", ("default",)),
        (
            EMPTY_THOUGHT,
            [TWO[0], said("a", "<think>a</think>2")],
            "behind its prompt",
            ("default",),
        ),
        (_TURNS + "Sure: {%- endif -%}", TWO, "behind its prompt", ("default",)),
    ],
)
def test_what_a_template_leaves_out_is_an_error_that_names_the_row(
    encoder_of, template, messages, why, scales
) -> None:
    row = {"messages": messages, "prompt_id": "d:7", "dataset": "d"}
    for scale in scales:
        encoder = encoder_of("{#- tools -#}" + template, loss_scale=scale)
        with pytest.raises(UsageError, match=f"d:7: .*{why}"):
            encoder.sequences(row)


def rows_of(tmp_path: Path, *rows: dict) -> list[dict]:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(load_rows(DataFlags(dataset=[str(path)], whole=True)).train)


def test_prompts_with_completions(tmp_path: Path, learned) -> None:
    """TRL's rows: only the completion is learned."""
    before = [TWO[0], TWO[1], TWO[2]]
    after = [said("a", "", tool_calls=[CALL]), said("t", "4"), said("a", "4!")]
    forms = [
        {"prompt": before, "completion": [TWO[3]]},
        {"prompt": before, "completion": after, "tools": TOOLS},
        {"prompt": "1+1", "completion": "2"},
        {"prompt": [TWO[0]], "completion": "2"},
    ]
    found = rows_of(tmp_path, *forms)
    assert [one["role"] for one in found[1]["messages"]] == [
        one["role"] for one in [*before, *after]
    ]
    texts = [
        [
            part
            for _, parts in learned(row["messages"], HERMES, row={"tools": row.get("tools", [])})
            for part in parts
        ]
        for row in found
    ]
    called = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    two = ["2<|im_end|>"]
    assert texts == [["3<|im_end|>"], [called, "4!<|im_end|>"], two, two]
    prompts = load_rows(DataFlags(dataset=[f"{tmp_path}/d.jsonl"])).train
    asked = [before, before, TWO[:1], TWO[:1]]
    assert [[*map(dict, one["messages"])] for one in prompts] == asked  # for `swift rlhf`


def test_weights_of_messages(tmp_path: Path, caplog) -> None:
    """OpenAI's `weight` says what ms-swift's `loss` does."""
    kept, *none = rows_of(
        tmp_path,
        {"messages": [TWO[0], said("a", "2", weight=0), TWO[2], said("a", "3", weight=1)]},
        {"messages": [TWO[0], said("a", "2", weight=0.5)]},
        {"messages": [TWO[0], said("a", "2", weight="0")]},
        {"messages": [said("u", "1+1", weight=0), TWO[1]]},
        {"messages": [TWO[0], said("a", "2", weight=0, loss=True)]},
    )
    assert [one.get("loss") for one in kept["messages"]] == [None, False, None, True]
    assert not none and "4 of 5" in caplog.text
    for fault in ("weight of a message must be", "weight of a message of the user"):
        assert fault in caplog.text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_by_any_name_reach_the_template(tmp_path: Path, encoder_of, name: str) -> None:
    [row] = rows_of(tmp_path, {"messages": [TWO[0], said("a", "2", **{name: "one and one"})]})
    for read in ("reasoning_content", "reasoning", "thinking"):
        template = CHANNELS.replace("m.thinking", f"m.{read}")
        [sequence] = encoder_of(template).sequences(row)
        text = encoder_of(template).tokenizer.decode(sequence.token_ids)
        assert "analysis<|message|>one and one<|end|>" in text
