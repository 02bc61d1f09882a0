"""What templates put around the model's turn, as those of the families do: the tags they open, the token that ends."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from swift_r1.data.prompts import PromptEncoder, Wording
from swift_r1.errors import UsageError
from tests.tool_templates import PARTS, THINKING

QUESTION = {"messages": [{"role": "user", "content": "1 + 1?"}], "dataset": "d", "prompt_id": "d:0"}
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def chatml(opening: str) -> str:
    return TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n" + opening + "{% endif %}"


HYBRID = chatml("{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}")
# The next turn's header ends the model's, as in GLM-4.
HEADERS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}<|im_start|>assistant"
# Only the last turn ends as the model is to end it, as in gpt-oss.
LAST = (
    "{% for m in messages %}{{ m.content }}"
    "{{ '<|im_start|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
)
ALWAYS_OPEN = "Q: {{ messages[-1].content }}\nA: <think>"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    """As a base model has it: its end token is not the template's."""
    own = AutoTokenizer.from_pretrained(tiny_model)
    own.eos_token = "<|endoftext|>"
    return own


def encoder(tokenizer: Any, template: str, **wording: Any) -> PromptEncoder:
    own = copy.copy(tokenizer)
    own.chat_template = template
    return PromptEncoder(own, wording=Wording(**wording))


@pytest.mark.parametrize(
    ("template", "thinking", "opening"),
    [
        (chatml(""), None, ""),
        (chatml("<think>\n"), None, "<think>\n"),
        (chatml("<think>"), None, "<think>"),
        (chatml("<seed:think>"), None, "<seed:think>"),
        (chatml("</think>"), None, "</think>"),
        (HYBRID, None, ""),
        (HYBRID, False, "<think>\n\n</think>\n\n"),
        (ALWAYS_OPEN, None, "<think>"),
    ],
)
def test_what_the_template_opens_is_the_models(
    tokenizer: Any, template: str, thinking: bool | None, opening: str
) -> None:
    made = encoder(
        tokenizer, template, arguments={} if thinking is None else {"enable_thinking": thinking}
    )
    prompt = made.encode(QUESTION)
    assert (
        prompt is not None and prompt.text.endswith(opening) and prompt.response_prefix == opening
    )
    # the prompt has it
    assert made.response_prefix == opening and tokenizer.decode(prompt.token_ids) == prompt.text


def test_a_question_that_ends_in_a_tag_opens_nothing(tokenizer: Any) -> None:
    asked = QUESTION | {"messages": [{"role": "user", "content": "What does <think>"}]}
    made = PromptEncoder(tokenizer, wording=Wording(template="no"))
    prompt = made.encode(asked)
    assert prompt is not None and prompt.text.endswith("<think>") and prompt.response_prefix == ""


def test_the_flag_and_the_templates_own_opening(tokenizer: Any) -> None:
    for prefix in ("<think>\n", "assistant\n<think>\n"):
        made = encoder(tokenizer, chatml("<think>\n"), response_prefix=prefix)
        assert (
            made.render(QUESTION["messages"]).count("<think>") == 1
            and made.response_prefix == prefix
        )
    with pytest.raises(
        UsageError,
        match=r"--response_prefix '<think>': .* begins the model's turn with '<think>\\n'",
    ):
        encoder(tokenizer, chatml("<think>\n"), response_prefix="<think>")


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (chatml("<think>\n"), "<|im_end|>"),
        (HEADERS, "<|im_start|>"),
        (LAST, "<|im_start|>"),
        (PARTS, "<|im_end|>"),
        (THINKING, "<|im_end|>"),
        (ALWAYS_OPEN, None),
        (
            "{{ raise_exception('one turn') if messages | length > 1 }}{{ messages[0].content }}",
            None,
        ),
    ],
)
def test_the_token_that_ends_a_turn(tokenizer: Any, template: str, end: str | None) -> None:
    made = encoder(tokenizer, template)
    wanted = None if end is None else tokenizer.convert_tokens_to_ids(end)
    assert made.turn_end == wanted
    prompt = made.encode(QUESTION)
    assert prompt is not None and prompt.turn_end == wanted


@pytest.mark.parametrize(("name", "end"), [("r1", None), ("qwen_math", "<|im_end|>"), ("no", None)])
def test_the_formats_of_our_own(tokenizer: Any, name: str, end: str | None) -> None:
    made = PromptEncoder(tokenizer, wording=Wording(template=name))
    assert made.turn_end == (None if end is None else tokenizer.convert_tokens_to_ids(end))
    assert made.response_prefix == ""
