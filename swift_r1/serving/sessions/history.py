"""Compares what an agent sends with what was there: does it continue a conversation, and if not, why not.

Each message has a key; two messages with one key mean the same to the conversation. For the model's own messages that
is wider than equality: agents send them back with other white space, `null` for no text, reasoning in a field of its
own, and tool calls written as other JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

Kind = Literal["new", "extends", "branch", "edited", "compacted", "system", "tools", "template"]
"""How a call stands to the earlier ones of its session.

new: a conversation of its own. extends: goes on behind the model's answer, whose tokens stay. branch: goes on from a
place that was continued already, or asks there again. edited: an earlier message has another text. compacted: earlier
messages are gone, with or without a summary in their place. system: another system message. tools: other tools, or in
another order. template: would extend, but the chat template cannot say what follows the model's turn.
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


def shared_start(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many keys two histories have in common at their start."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def kind_of_new(
    now: Sequence[bytes],
    roles: Sequence[str],
    was: Sequence[bytes],
    written: Collection[bytes],
    system_was: bool,
) -> Kind:
    """Returns the kind of a call that extends nothing, against the earlier history that is most like it.

    Args:
        now, roles: keys and roles of the call's messages.
        was: keys of the earlier history, the model's answer at its end included.
        written: keys of what the model wrote in this session.
        system_was: whether `was` begins with a system message.
    """
    place = shared_start(now, was)
    if place == len(now):
        return "branch"  # goes back, or asks again
    if place == len(was):  # answered, it would be extended were its tools not others
        return "tools" if was[-1] in written else "branch"
    if was[place] in written:
        if roles[place] != "assistant" or now[place] in was[place + 1 :]:
            return "compacted"
        behind_was = was[place + 1 :]
        behind_now = now[place + 1 :]
        return "edited" if not behind_was or behind_now[:1] == behind_was[:1] else "compacted"
    later = [key for key in was[place:] if key in written]
    kept = next((key for key in now[place:] if key in later), None)
    if place == 0 and (roles[0] in ("system", "developer") or system_was):
        rest_now = now[1:] if roles[0] in ("system", "developer") else now
        rest_was = was[1:] if system_was else was
        shared = shared_start(rest_now, rest_was)
        if shared and (kept is not None or shared == min(len(rest_now), len(rest_was))):
            return "system"
    if kept is None:
        return "new"
    return "compacted" if list(now).index(kept) < list(was).index(kept) else "edited"
