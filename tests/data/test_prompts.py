"""Prompts as the model sees them: template, system message, token ids once, length limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swift_r1.data.prompts import PromptEncoder, Wording
from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments
from swift_r1.models.shape import longest_prompt

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a symbol a character and tags as special tokens."""
    special = ["<unk>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>", "<bos>"]
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    backend = Tokenizer(
        models.WordLevel(
            {token: index for index, token in enumerate(special + characters)}, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=special[1:5],
        chat_template=TEMPLATE,
    )


def row(content: str = "hello", **columns: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "dataset": "set",
        "prompt_id": "set:0",
        **columns,
    }


@pytest.mark.parametrize(
    "word",
    ["<|image_pad|>", "[IMG]", "<image>"],
)
def test_a_word_for_a_part_of_an_image_is_text(tokenizer: Any, word: str) -> None:
    """In as many tokens as it has characters here; other special tokens of a message stay what they are."""
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=[word],
        chat_template=TEMPLATE,
    )
    placeholder = own.convert_tokens_to_ids(word)
    assert own(word, add_special_tokens=False)["input_ids"] == [placeholder]
    prompt = PromptEncoder(own, Wording(f"no {word}")).encode(row(f"What is {word}?<|end|>"))
    assert prompt is not None and placeholder not in prompt.token_ids
    assert (
        prompt.text
        == f"<|system|>no {word}<|end|>\n<|user|>What is {word}?<|end|><|end|>\n<|assistant|>"
    )
    assert (
        own.decode(list(prompt.token_ids)) == prompt.text
        and prompt.token_ids.count(own.eos_token_id) == 3
    )


def test_the_template_is_rendered_and_tokenised_once(tokenizer: Any) -> None:
    prompt = PromptEncoder(tokenizer, Wording("be kind")).encode(row(target=5))
    assert prompt is not None
    assert prompt.text == "<|system|>be kind<|end|>\n<|user|>hello<|end|>\n<|assistant|>"
    assert tokenizer.decode(list(prompt.token_ids)) == prompt.text
    assert tokenizer.bos_token_id not in prompt.token_ids
    assert (prompt.prompt_id, prompt.dataset, dict(prompt.columns)) == (
        "set:0",
        "set",
        {"target": 5},
    )
    assert [message["role"] for message in prompt.messages] == ["system", "user"]


def test_a_rows_own_system_message_stays(tokenizer: Any) -> None:
    own = row()
    own["messages"].insert(0, {"role": "system", "content": "own"})
    prompt = PromptEncoder(tokenizer, Wording("flag")).encode(own)
    assert prompt is not None and prompt.text.startswith("<|system|>own<|end|>\n<|user|>")
    bare = PromptEncoder(tokenizer).encode(row())
    assert bare is not None and bare.text.startswith("<|user|>")
    assert len(own["messages"]) == 2, "the row must not change"


def test_no_chat_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(UsageError, match="no chat template"):
        PromptEncoder(tokenizer)


def test_without_max_length_a_prompt_and_its_completion_fit_the_models_context(
    tiny_model: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def encoder(**flags: Any) -> PromptEncoder:
        flags = {
            "model": str(tiny_model),
            "max_completion_length": 24,
            "reward_funcs": ["format"],
        } | flags
        args = RlhfArguments(rlhf_type="grpo", dataset=["none"], **flags)
        return PromptEncoder(
            tokenizer, Wording.of(args), longest_prompt(args), args.truncation_strategy
        )

    huge = row("x" * 120_000)
    assert encoder().fitting([row(), huge]) == [row()]
    assert "1 of 2 training prompts left out: longer than 1000 tokens" in caplog.text
    assert not encoder().fits(huge) and encoder().encode(huge) is None
    exact = row("x" * (1000 - len(encoder().encode(row("")).token_ids)))
    assert encoder().fits(exact) and not encoder(max_completion_length=25).fits(exact)
    assert encoder(max_length=130_000).fits(huge)
    assert encoder(multi_turn_scheduler="any").fits(huge)  # cut to the context as it goes
    with pytest.raises(
        UsageError,
        match="--max_completion_length 1024 leaves no room for a prompt: the model takes",
    ):
        encoder(max_completion_length=1024)
