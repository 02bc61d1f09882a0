"""Compares what an agent sends with what was there: does it continue a conversation?

Each message has a key; two messages with one key mean the same to the conversation. For the model's own messages that
is wider than equality: agents send them back with other white space, `null` for no text, reasoning in a field of its
own, and tool calls written as other JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

Kind = Literal["new", "extends", "branch"]
"""How a call stands to the earlier ones of its session.

new: its prompt is rendered as a whole, as of a first call, of a history that was edited or shortened, or with other
tools. extends: goes on behind the model's answer, whose tokens stay. branch: the same, behind an answer that another
call has continued already.
"""

Message = Mapping[str, Any]


def text_of(message: Message) -> str:
    """A message's text: a string, `null` for none, or OpenAI's text parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def digest(*parts: bytes) -> bytes:
    framed = [piece for part in parts for piece in (len(part).to_bytes(8, "big"), part)]
    return hashlib.blake2b(b"".join(framed), digest_size=16).digest()


_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_quoted = json.encoder.encode_basestring_ascii


def canonical(value: Any) -> bytes:
    """JSON of one form."""
    return _JSON.encode(value).encode()


def keys_of(messages: Iterable[Message], ids: dict[str, int]) -> list[bytes]:
    """A key for each message. Ids of tool calls, which servers draw, count by the order in which they appear; `ids` has
    those of earlier messages, and takes up these."""
    return [_key(message, ids) for message in messages]


def _key(message: Message, ids: dict[str, int]) -> bytes:
    role = "system" if message["role"] == "developer" else message["role"]
    text = text_of(message)
    reasoning = ""
    calls = []
    if role == "assistant":
        text, reasoning = _said(text, message.get("reasoning_content") or "")
        for call in message.get("tool_calls") or ():
            ids.setdefault(call["id"], len(ids))
            calls.append([call["function"]["name"], _arguments(call["function"]["arguments"])])
    answers = message.get("tool_call_id")
    number = None if answers is None else ids.setdefault(answers, len(ids))
    # As `canonical` writes it, in a fifth of its time: each call of an agent has all messages again.
    quoted = [_quoted(role), _quoted(text), canonical(calls).decode() if calls else "[]"]
    return digest(
        f"[{','.join(quoted)},{'null' if number is None else number},{_quoted(reasoning)}]".encode()
    )


def _said(text: str, reasoning: str) -> tuple[str, str]:
    """The model's text and reasoning without what clients change: they take the reasoning out of the text, put it back,
    and have white space of their own."""
    if not reasoning and "</think>" in text:
        reasoning, _, text = text.partition("</think>")
        reasoning = reasoning.strip().removeprefix("<think>")
    return " ".join(text.split()), " ".join(reasoning.split())


def _arguments(text: str) -> str:
    """Returns a tool call's arguments as JSON of one form; a text that is none, or is nested beyond reading, without
    its outer white space."""
    try:
        return canonical(json.loads(text, parse_float=_number)).decode()
    except (ValueError, RecursionError):
        return text.strip()


def _number(text: str) -> float:
    """1.0 is 1, as JavaScript writes it."""
    value = float(text)
    return int(value) if value.is_integer() else value


def heads(start: bytes, keys: Iterable[bytes]) -> Iterator[bytes]:
    """Digests of a history's beginnings: before the first message, then behind each."""
    yield start
    for key in keys:
        start = digest(start, key)
        yield start
