"""What a chat template puts around the model's turn: the `<think>` that it opens, and the token that ends it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from swift_r1.errors import UsageError

_STANDS_FOR = "swift-r1-text-c41f0a"  # a message's text where only what the template puts behind it is wanted
_THINK = r"[\w:]*(?:think|thought|reason)[\w:]*"
_OPENING = re.compile(rf"(?:<{_THINK}>\s*)?(?:</{_THINK}>\s*)?$")


class Renderer(Protocol):
    """The chat template: messages to text, with the start of the model's next turn where that is asked for."""

    def __call__(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str: ...


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool, **given: Any) -> str:
    """Messages in the tokenizer's chat template; `given` are more of its variables.

    Raises:
        UsageError: the template refuses the messages.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **given
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UsageError(f"the chat template cannot render messages of {roles}: {error}") from error


def opening_of(render: Renderer) -> str:
    r"""The reasoning tags that the template begins the model's turn with: `<think>\n` of QwQ and R1-Distill, an empty
    block where thinking is switched off, and "" of most. They are in the prompt, and part of what the model says.

    Raises:
        UsageError: the template refuses a user's message.
    """
    text = render([{"role": "user", "content": _STANDS_FOR}], True)
    # Only what stands behind the message: a question may end in such a tag too.
    found = _OPENING.search(text.rpartition(_STANDS_FOR)[2])
    assert found is not None  # it matches nothing at all
    return found[0]


def turn_end(render: Renderer, tokenizer: Any) -> int | None:
    """The first special token behind an assistant's turn, as the template renders it; None where there is none.

    A base model's end token is often another: it would write on behind the turn, and begin the user's. The turn is the
    last one, since others may end otherwise (gpt-oss); where nothing ends that, the next turn's beginning does (GLM-4).
    """
    special = special_tokens(tokenizer)
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _STANDS_FOR}]
    for messages in (turns, [*turns, turns[0]]):
        try:
            _, found, behind = render(messages, False).rpartition(_STANDS_FOR)
        except UsageError:  # a template of one turn
            return None
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"] if found else []
        for token in ids:
            if token in special:
                return int(token)
    return None


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids of tokens that are no text; that of unknown text is none of them, but where it is the end token too."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {token for token, about in added.items() if about.special}
    unknown = {tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    return frozenset({*tokenizer.all_special_ids, *marked} - unknown)
