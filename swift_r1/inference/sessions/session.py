"""One session: its calls as token ids, and the sequences that they make. Nothing here waits, and nothing knows HTTP.

A call that continues an earlier one keeps that one's tokens: its prompt is they, and what the chat template puts behind
the model's turn. So each call holds only the tokens that it adds, and sequences are chains of calls.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swift_r1.inference.sessions.history import (
    Kind,
    Message,
    canonical,
    digest,
    heads,
    keys_of,
    kind_of_new,
    shared_start,
)
from swift_r1.wire import sessions as wire
from swift_r1.wire.protocol import FinishReason, HTTPError, completion_seed

_LIKELY = 64  # histories that a call which extends none is compared with: the newest ones
_BYTES_PER_TOKEN = 12  # an id and a log-prob
_BYTES_PER_MESSAGE = 300  # beside its text
_BYTES_PER_CALL = 2000


class Wording(Protocol):
    """The model's chat template and tokenizer."""

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a turn."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The whole conversation, with the opening of an answer."""

    def behind(
        self, messages: Sequence[Message], place: int, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...] | None:
        """What follows the text of the model's turn `messages[place]`, with the opening of an answer; None where the
        template cannot say."""

    def encode(self, text: str) -> tuple[int, ...]:
        """A plain text."""

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Of each token alone."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call says. `settings` is all else that its answer depends on; `prompt` is for plain completions, which
    have no messages."""

    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class Call:
    """A call, answered once `finish_reason` is there.

    Attributes:
        content: digest of what it says; `again` numbers the calls that say the same.
        keys: of the messages that it adds to its parent's history, in the end with the answer's.
        head: digest of its history, in the end with the answer.
        added: prompt tokens behind the parent's tokens.
    """

    number: int
    kind: Kind
    parent: Call | None
    content: bytes
    again: int
    seed: int | None
    asked: Asked
    head: bytes
    keys: list[bytes]
    added: array[int]
    prompt_tokens: int
    began: float
    completion_id: str = ""
    children: int = 0  # calls that go on behind this one
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    versions: tuple[tuple[int, int], ...] = ()
    finish_reason: FinishReason | None = None
    text: str = ""
    answer: Message | None = None
    seconds: float = 0.0
    held: int = 0  # bytes of `asked` and `answer`

    def line(self) -> list[Call]:
        """The calls from the first one to this."""
        calls: list[Call] = [self]
        while (parent := calls[-1].parent) is not None:
            calls.append(parent)
        return calls[::-1]

    def tokens(self) -> list[int]:
        """Of the prompt and, once it is there, the answer."""
        together = array("i")
        for call in self.line():
            together += call.added + call.token_ids
        return together.tolist()

    def history(self) -> list[bytes]:
        return [key for call in self.line() for key in call.keys]


class SessionState:
    """Calls and counts of one session. `request` is what it was opened with, except the id."""

    def __init__(
        self, name: str, request: wire.SessionRequest, key: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.request, self.key = name, request, key
        self.began = self.used = clock()
        self.calls: list[Call] = []  # answered ones
        self.running: list[Call] = []
        self.kinds: Counter[str] = Counter()
        self.overruled: Counter[str] = Counter()
        self.retried = self.failed = self.tokens = self.bytes = 0
        self._clock = clock
        self._numbers = 0
        self._by_head: dict[bytes, list[Call]] = {}
        self._by_content: dict[bytes, dict[int, Call]] = {}
        self._owed: Counter[bytes] = Counter()  # calls without an answer: a retry of theirs is a call
        self._written: set[bytes] = set()  # keys of the model's messages

    def left(self) -> tuple[int | None, float | None]:
        """Tokens and seconds that are left. Raises HTTPError (403) where the session's limits let no call in."""
        limits = self.request.limits
        seconds = None if limits.seconds is None else self.began + limits.seconds - self._clock()
        tokens = None if limits.tokens is None else limits.tokens - self.tokens
        if seconds is not None and seconds <= 0:
            raise HTTPError(403, f"the session's {limits.seconds:g} s are over")
        if tokens is not None and tokens <= 0:
            raise HTTPError(403, f"the session's {limits.tokens} tokens are used up")
        if limits.calls is not None and len(self.calls) + len(self.running) >= limits.calls:
            raise HTTPError(403, f"the session's {limits.calls} calls are used up")
        return tokens, seconds

    def content_of(self, asked: Asked) -> bytes:
        said = [*keys_of(asked.messages)]
        if asked.prompt is not None:
            said.append(canonical(asked.prompt))
        return digest(_tools_key(asked), *said, canonical(dict(asked.settings)))

    def retry_of(self, content: bytes) -> Call | None:
        """The call that a retry with this content repeats: the newest one that was not continued, unless a call with it
        has failed, which is what the client tries again."""
        if self._owed[content]:
            self._owed[content] -= 1
            return None
        for call in reversed(self._by_content.get(content, {}).values()):
            if not call.children:
                self.retried += 1
                self.used = self._clock()
                return call
        return None

    def begin(self, asked: Asked, wording: Wording) -> tuple[Call, list[int]]:
        """A new call and its prompt. Raises HTTPError as `left`, and what the wording raises."""
        self.left()
        content = self.content_of(asked)
        same = self._by_content.setdefault(content, {})
        again = next(number for number in range(len(same) + 1) if number not in same)
        parent, kind, added, keys, head = (self._chat if asked.prompt is None else self._plain)(asked, wording)
        seed = self.request.seed
        call = Call(
            number=self._numbers,
            kind=kind,
            parent=parent,
            content=content,
            again=again,
            seed=None if seed is None else completion_seed(seed, content.hex(), again),
            asked=asked,
            head=head,
            keys=keys,
            added=array("i", added),
            prompt_tokens=0,
            began=self._clock(),
        )
        prompt = call.tokens()
        call.prompt_tokens = len(prompt)
        self._numbers += 1
        self.running.append(call)
        same[again] = call
        if parent is not None:
            parent.children += 1
        self.used = self._clock()
        return call, prompt

    def finish(
        self,
        call: Call,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[tuple[int, int]],
        finish_reason: FinishReason,
        text: str,
        answer: Message | None,
    ) -> None:
        """The call's answer: for a chat the message as the client gets it."""
        call.token_ids, call.logprobs = array("i", token_ids), array("d", logprobs)
        call.versions, call.finish_reason = tuple(versions), finish_reason
        call.text, call.answer = text, answer
        self.used = self._clock()
        call.seconds = self.used - call.began
        if answer is not None:
            # With the whole conversation, since ids of tool calls count by their order in it.
            call.keys.append(keys_of([*call.asked.messages, answer])[-1])
            call.head = digest(call.head, call.keys[-1])
            self._written.add(call.keys[-1])
            self._by_head.setdefault(call.head, []).append(call)
        if (parent := call.parent) is not None and parent.asked.messages:
            # What it said is part of this call's messages.
            self.bytes -= parent.held
            parent.asked, parent.answer = Asked(), None
        self.running.remove(call)
        self.calls.append(call)
        self.kinds[call.kind] += 1
        self.tokens += len(token_ids)
        asked = call.asked
        call.held = len(canonical([asked.messages, asked.tools, asked.prompt, text, answer]))
        tokens = len(call.added) + len(call.token_ids)
        self.bytes += _BYTES_PER_CALL + call.held + _BYTES_PER_MESSAGE * len(call.keys) + _BYTES_PER_TOKEN * tokens

    def fail(self, call: Call) -> None:
        """The call has no answer, and leaves no trace but in the counts."""
        self.running.remove(call)
        del self._by_content[call.content][call.again]
        if call.parent is not None:
            call.parent.children -= 1
        self.refused(call.content)

    def refused(self, content: bytes) -> None:
        """A call was not even begun."""
        self.failed += 1
        self._owed[content] += 1
        self.used = self._clock()

    def _chat(self, asked: Asked, wording: Wording) -> tuple[Call | None, Kind, Sequence[int], list[bytes], bytes]:
        keys = keys_of(asked.messages)
        beginnings = list(heads(_tools_key(asked), keys))
        longest = next((place for place in range(len(keys), 0, -1) if self._by_head.get(beginnings[place])), 0)
        if longest:
            parent = min(self._by_head[beginnings[longest]], key=lambda call: call.children)
            added = wording.behind(asked.messages, longest - 1, asked.tools)
            if added is not None:
                last = parent.token_ids[-1] if parent.token_ids else None
                if added and added[0] == last and last in wording.ends:
                    added = added[1:]  # the model ended its turn itself
                kind: Kind = "branch" if parent.children else "extends"
                return parent, kind, added, keys[longest:], beginnings[-1]
        kind = "template" if longest else self._kind(asked, keys)
        return None, kind, wording.render(asked.messages, asked.tools), keys, beginnings[-1]

    def _kind(self, asked: Asked, keys: Sequence[bytes]) -> Kind:
        """Of a chat that extends nothing."""
        said = set(keys)
        likeliest: tuple[tuple[int, int, int], Call, list[bytes]] | None = None
        for call in self._open():
            was = call.history()
            same = sum(1 for key in was if key in said)
            own = sum(1 for key in was if key in said and key in self._written)
            rank = (own, shared_start(was, keys), same)
            if likeliest is None or rank > likeliest[0]:
                likeliest = rank, call, was
        if likeliest is None or not any(likeliest[0]):
            return "new"
        _, call, was = likeliest
        roles = [message["role"] for message in asked.messages]
        system_was = call.asked.messages[0]["role"] in ("system", "developer")
        kind = kind_of_new(keys, roles, was, self._written, system_was)
        return "tools" if kind == "branch" and _tools_key(asked) != _tools_key(call.asked) else kind

    def _open(self) -> Iterator[Call]:
        """The newest chats that were not continued, running ones included."""
        found = 0
        for call in [*reversed(self.running), *reversed(self.calls)]:
            if call.asked.messages and not call.children:
                yield call
                found += 1
            if found == _LIKELY:
                return

    def _plain(self, asked: Asked, wording: Wording) -> tuple[Call | None, Kind, Sequence[int], list[bytes], bytes]:
        """A prompt that begins with an earlier one and its answer goes on behind those tokens."""
        prompt = asked.prompt
        assert prompt is not None
        best: tuple[int, Call] | None = None
        for call in reversed(self.calls[-_LIKELY:]):
            if isinstance(prompt, str):
                was = call.asked.prompt + call.text if isinstance(call.asked.prompt, str) else None
                length = len(was) if was and prompt.startswith(was) else 0
            else:
                ids = tuple(call.tokens()) if call.asked.prompt is not None else ()
                length = len(ids) if ids and prompt[: len(ids)] == ids else 0
            if length and (best is None or (length, not call.children) > (best[0], not best[1].children)):
                best = length, call
        if best is not None:
            length, call = best
            kind: Kind = "branch" if call.children else "extends"
            if not isinstance(prompt, str):
                return call, kind, prompt[length:], [], b""
            rest = wording.encode(prompt[length:]) if prompt[length:] else ()
            last = call.token_ids[-1] if call.token_ids else None
            if last not in wording.ends:
                return call, kind, rest, [], b""
            if rest and rest[0] == last:  # the agent writes the model's end token itself
                return call, kind, rest[1:], [], b""
            return None, "edited", wording.encode(prompt), [], b""  # the model's end was taken away
        return None, "new", prompt if not isinstance(prompt, str) else wording.encode(prompt), [], b""

    def record(self) -> wire.SessionRecord:
        chains = self._chains()
        place = {call: number for number, chain in enumerate(chains) for call in chain}
        return wire.SessionRecord(
            id=self.name,
            seed=self.request.seed,
            running=len(self.running),
            tokens=self.tokens,
            seconds=self._clock() - self.began,
            kinds=dict(self.kinds),
            retried=self.retried,
            failed=self.failed,
            overruled=dict(self.overruled),
            calls=tuple(_recorded(call, place[call]) for call in self.calls),
            sequences=tuple(_sequence(chain) for chain in chains),
        )

    def _chains(self) -> list[list[Call]]:
        """The calls as sequences: a call is continued by the first that extends it; in a session with a seed, where the
        order of calls must not matter, by the one with the smallest content."""
        continued: dict[Call, Call] = {}
        order = self.calls
        if self.request.seed is not None:
            order = sorted(order, key=lambda call: (len(call.line()), call.content, call.again))
        for call in order:
            if call.parent is not None:
                continued.setdefault(call.parent, call)
        chains = []
        for call in order:
            if call.parent is None or continued[call.parent] is not call:
                chain = [call]
                while (following := continued.get(chain[-1])) is not None:
                    chain.append(following)
                chains.append(chain)
        return chains


def _tools_key(asked: Asked) -> bytes:
    return digest(*(canonical(tool) for tool in asked.tools))


def _recorded(call: Call, sequence: int) -> wire.RecordedCall:
    assert call.finish_reason is not None
    return wire.RecordedCall(
        number=call.number,
        completion_id=call.completion_id,
        kind=call.kind,
        parent=None if call.parent is None else call.parent.number,
        sequence=sequence,
        prompt_tokens=call.prompt_tokens,
        completion_tokens=len(call.token_ids),
        finish_reason=call.finish_reason,
        weight_versions=call.versions,
        seed=call.seed,
        seconds=round(call.seconds, 3),
    )


def _sequence(chain: Sequence[Call]) -> wire.RecordedSequence:
    first, last = chain[0], chain[-1]
    assert last.finish_reason is not None
    prompt = first.tokens()[: first.prompt_tokens]
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int | None] = []
    for call in chain:
        if call is not first:
            tokens += call.added
            mask += [False] * len(call.added)
            logprobs += [0.0] * len(call.added)
            versions += [None] * len(call.added)
        tokens += call.token_ids
        mask += [True] * len(call.token_ids)
        logprobs += call.logprobs
        versions += _of_tokens(call.versions, len(call.token_ids))
    answer = [] if last.answer is None else [dict(last.answer)]
    return wire.RecordedSequence(
        calls=tuple(call.number for call in chain),
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(tokens),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        finish_reason=last.finish_reason,
        messages=(*map(dict, last.asked.messages), *answer),
        tools=tuple(map(dict, last.asked.tools)),
    )


def _of_tokens(versions: Sequence[tuple[int, int]], length: int) -> list[int]:
    """`(first token, version)` in order, as a version for each token."""
    ends = [start for start, _ in versions[1:]] + [length]
    return [version for (start, version), end in zip(versions, ends, strict=True) for _ in range(start, end)]
