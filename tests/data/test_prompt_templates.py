"""The prompt formats, response prefixes and cut prompts, with a tokenizer of every character."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from swift_r1.data.prompt_templates import check_arguments, prompt_template, rendered, text_of
from swift_r1.data.prompts import PromptEncoder, Wording, tokenizer_of_run
from swift_r1.errors import UsageError
from swift_r1.models.loading import load_tokenizer
from tests import tool_templates

QUESTION = [{"role": "user", "content": "What is {1} + 1?"}]
R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    "<think> reasoning process here </think> <answer> answer here </answer>.\nUser: What is {1} + 1?\nAssistant:"
)
QWEN_MATH = (
    "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>user\nWhat is {1} + 1?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def encoder(
    tokenizer: Any, max_length: int | None = None, truncation: str = "delete", **wording: Any
) -> PromptEncoder:
    return PromptEncoder(tokenizer, Wording(**wording), max_length, truncation)


@pytest.mark.parametrize(
    ("name", "text"), [("r1", R1), ("qwen_math", QWEN_MATH), ("no", "What is {1} + 1?")]
)
def test_the_published_formats(tokenizer: Any, name: str, text: str) -> None:
    made = encoder(tokenizer, template=name)
    assert made.render(QUESTION) == text
    prompt = made.encode({"messages": QUESTION, "dataset": "d", "prompt_id": "d:0"})
    assert prompt is not None and tokenizer.decode(prompt.token_ids) == prompt.text == text
    # special tokens of the format are tokens, not their characters
    assert (tokenizer.convert_tokens_to_ids("<|im_start|>") in prompt.token_ids) == (
        name == "qwen_math"
    )


@pytest.mark.parametrize("name", ["r1", "qwen_math", "no"])
def test_a_system_message_takes_the_place_of_the_instruction(tokenizer: Any, name: str) -> None:
    text = encoder(tokenizer, template=name, system="Be brief.").render(QUESTION)
    own = encoder(tokenizer, template=name).render(
        [{"role": "system", "content": "Be brief."}, *QUESTION]
    )
    assert (
        text == own
        and "Be brief." in text
        and "reasoning" not in text
        and "step by step" not in text
    )


def test_a_file(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if enable_thinking is defined %}thinking {{ enable_thinking }}\n{% endif %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert (
        encoder(tokenizer, template=str(file)).render(QUESTION)
        == "user: What is {1} + 1?\nassistant:"
    )
    thinking = encoder(tokenizer, template=str(file), arguments={"enable_thinking": False}).render(
        QUESTION
    )
    assert thinking == "user: What is {1} + 1?\nthinking False\nassistant:"
    file.write_text("{{ raise_exception('no system messages') }}")
    with pytest.raises(UsageError, match="cannot render messages of user: no system messages"):
        encoder(tokenizer, template=str(file)).render(QUESTION)


def test_arguments_of_the_template(tokenizer: Any, tmp_path: Path) -> None:
    """A checkpoint's template has them, unless it is given others."""
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% macro say(x) %}{{ x }} {{ effort }}{% endmacro %}"
        "{% set deep = deep | default(none) %}{{ say('effort') }} {{ deep | tojson }} {{ quote }} {{ thinking }}"
        "{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    )
    arguments = {
        "effort": 1e-05,
        "deep": {"a": [None, True, "é"]},
        "quote": 'it\'s {{ "so" }}\n',
        "thinking": False,
    }
    made = encoder(tokenizer, template=str(file), arguments=arguments)
    text = 'effort 1e-05 {"a": [null, true, "é"]} it\'s {{ "so" }}\n FalseWhat is {1} + 1?'
    assert made.render(QUESTION) == text
    own = tokenizer_of_run(
        tokenizer, Wording(template=str(file), arguments=arguments, system="Be brief.")
    )
    assert own.apply_chat_template(QUESTION, tokenize=False) == text
    assert own.apply_chat_template(QUESTION, tokenize=False, thinking=True) == text.replace(
        "False", "True"
    )
    several = copy.copy(tokenizer)
    several.chat_template = {
        "default": "{{ effort }}",
        "tool_use": "{{ messages[0].role }}: {{ thinking }}",
    }
    kept = tokenizer_of_run(
        several, Wording(arguments={"effort": 1, "thinking": True}, system="Be brief.")
    )
    assert kept.apply_chat_template(QUESTION, tokenize=False) == "1"
    assert kept.apply_chat_template(QUESTION, tools=[{}], tokenize=False) == "system: True"
    with pytest.raises(
        UsageError,
        match=r"does not read thinkin, .* \(the template reads deep, effort, quote, thinking\)",
    ):
        encoder(tokenizer, template=str(file), arguments={"thinkin": True, "effort": 1})


def test_the_template_of_a_processor(tiny_model: Path, tmp_path: Path) -> None:
    """In the older file, which tokenizers do not read."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    own = AutoTokenizer.from_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": own.chat_template}))
    (folder / "chat_template.jinja").unlink()
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
    assert load_tokenizer(str(folder)).chat_template == own.chat_template


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "no name"])
def test_what_is_no_argument(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"has '{name}', which is not an argument of a chat template"
    ):
        check_arguments({name: True})


def test_contents_in_parts(tokenizer: Any) -> None:
    """A template gets the form that it renders, and the tokens are the same."""
    own = copy.copy(tokenizer)
    own.chat_template = tool_templates.PARTS
    turns = [
        *QUESTION,
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "And <|im_end|>?"},
    ]
    text = encoder(tokenizer).render(turns)
    assert encoder(own).render(turns) == text and "What is {1} + 1?" in text
    assert encoder(own).turn_end == encoder(tokenizer).turn_end
    assert (
        text_of(
            [
                {"type": "text", "text": "What is "},
                {"type": "text", "text": "{1} + 1?", "index": None},
            ]
        )
        == (QUESTION[0]["content"])
    )


@pytest.mark.parametrize(
    ("value", "content", "message"),
    [
        ("r2", None, "--prompt_template r2: write r1, qwen_math, no, or the path of a Jinja file"),
        ("x.jinja", "line\n{% if %}", "x.jinja:2: "),
        ("x.jinja", b"\xff", "x.jinja: cannot be read"),
    ],
)
def test_what_is_no_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, content: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(value).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message) as caught:
        prompt_template(value)
    assert "\n" not in str(caught.value)


def test_no_code_runs_in_a_template(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "evil.jinja"
    file.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UsageError, match="cannot render"):
        encoder(tokenizer, template=str(file)).render(QUESTION)


def test_a_response_prefix_is_in_the_prompt(tokenizer: Any) -> None:
    made = encoder(tokenizer, response_prefix="<think>", system="s")
    prompt = made.encode({"messages": QUESTION, "dataset": "d", "prompt_id": "d:0"})
    assert prompt is not None and prompt.text.endswith("<|im_start|>assistant\n<think>")
    assert prompt.response_prefix == "<think>" and prompt.token_ids[
        -1
    ] == tokenizer.convert_tokens_to_ids("<think>")
    assert (
        encoder(tokenizer, template="r1", response_prefix=" <think>").render(QUESTION)
        == R1 + " <think>"
    )


def test_long_prompts_are_cut_or_left_out(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {
            "messages": [{"role": "user", "content": "x" * size}],
            "dataset": "d",
            "prompt_id": f"d:{size}",
        }
        for size in (5, 300)
    ]
    left_out = encoder(tokenizer, 100)
    assert [row["prompt_id"] for row in left_out.fitting(rows)] == ["d:5"]
    assert (
        left_out.encode(rows[1]) is None and left_out.fits(rows[0]) and not left_out.fits(rows[1])
    )
    assert "1 of 2 training prompts left out: longer than 100 tokens" in caplog.text
    cut = encoder(tokenizer, 100, "left", response_prefix="<think>")
    assert len(cut.fitting(rows)) == 2 and cut.fits(rows[1])
    assert "1 of 2 training prompts cut to their last 100 tokens" in caplog.text
    prompt = cut.encode(rows[1])
    assert prompt is not None and len(prompt.token_ids) == 100
    assert prompt.text.endswith("x<|im_end|>\n<|im_start|>assistant\n<think>")
    assert tokenizer.decode(prompt.token_ids) == prompt.text


@pytest.mark.parametrize("template", ["r1", "qwen_math", "no", None])
@pytest.mark.parametrize("system", [None, 'Say "why", then\n\\boxed{}. Grüße \U0001f600'])
@pytest.mark.parametrize("prefix", ["", " <think>", "Let's\n<reasoning>"])
def test_a_checkpoints_template_says_what_the_flags_said(
    tokenizer, template, system, prefix
) -> None:
    wording = Wording(system, template, prefix)
    during = PromptEncoder(tokenizer, wording=wording)
    kept = tokenizer_of_run(tokenizer, wording)
    after = PromptEncoder(kept)
    conversations = [
        [{"role": "user", "content": "2+2?"}],
        [{"role": "system", "content": "Own."}, {"role": "user", "content": "2+2?"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    ]
    for messages in conversations:
        asked = during.encode({"messages": messages, "prompt_id": "p", "dataset": "d"})
        assert asked is not None
        assert after.render(messages) == asked.text
        # The same flags again, as `swift eval` of the checkpoint has them, add nothing twice.
        again = PromptEncoder(kept, wording=Wording(system, None, prefix))
        repeated = again.encode({"messages": messages, "prompt_id": "p", "dataset": "d"})
        assert repeated is not None and repeated.text == asked.text
    assert tokenizer.chat_template != kept.chat_template or wording == Wording()


def test_a_templates_last_newline_stays(tokenizer) -> None:
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}Answer:\n\n"
    wording = Wording(response_prefix="<think>")
    messages = [{"role": "user", "content": "x"}]
    assert PromptEncoder(tokenizer, wording=wording).render(messages) == "x\nAnswer:\n<think>"
    assert (
        PromptEncoder(tokenizer_of_run(tokenizer, wording)).render(messages)
        == "x\nAnswer:\n<think>"
    )


def test_a_template_that_calls_itself_is_a_fault(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"
    with pytest.raises(UsageError, match="the chat template cannot render messages of user"):
        rendered(tokenizer, QUESTION, True)
