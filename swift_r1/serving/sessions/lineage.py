"""Which earlier call a call goes on from, in tokens; and if from none, what kind of call it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swift_r1.serving.sessions.calls import Asked, ChatRenderer, ModelCall
from swift_r1.serving.sessions.history import Kind, heads, kind_of_new, shared_start

_LIKELY = 64  # calls that one which extends none is compared with: the newest ones


@dataclass(frozen=True, slots=True)
class Continuation:
    """The place of a call: behind `parent`, with `added` as the tokens of its prompt behind that call's; `keys` are of
    the messages that it adds, `head` is the digest of its history."""

    parent: ModelCall | None
    kind: Kind
    added: Sequence[int]
    keys: list[bytes]
    head: bytes


class Lineage:
    """The answered calls of a session by what they say, and the running ones."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self.running: list[ModelCall] = []
        self._by_head: dict[bytes, list[ModelCall]] = {}
        self._written: set[bytes] = set()  # keys of the model's messages

    def answered(self, call: ModelCall) -> None:
        """The call is over, with `head` and `keys` of its answer."""
        self.running.remove(call)
        self.calls.append(call)
        if call.answer is not None:
            self._written.add(call.keys[-1])
            self._by_head.setdefault(call.head, []).append(call)

    def failed(self, call: ModelCall) -> None:
        """The call is as if it had never been, answered or not."""
        if call in self.running:
            self.running.remove(call)
            return
        self.calls.remove(call)
        if call.answer is not None:
            self._by_head[call.head].remove(call)

    def place(self, asked: Asked, wording: ChatRenderer) -> Continuation:
        return (
            self._chat(asked, wording)
            if asked.prompt is None
            else self._plain(asked.prompt, wording)
        )

    def _chat(self, asked: Asked, wording: ChatRenderer) -> Continuation:
        keys = asked.keys
        beginnings = list(heads(asked.tools_key, keys))
        longest = next(
            (place for place in range(len(keys), 0, -1) if self._by_head.get(beginnings[place])), 0
        )
        if longest:
            # Where several said the same, the choice does not depend on which was answered first.
            parent = min(
                self._by_head[beginnings[longest]],
                key=lambda call: (call.children, call.content, call.again),
            )
            added = wording.behind(asked.messages, longest - 1, asked.tools)
            if added is not None:
                last = parent.token_ids[-1] if parent.token_ids else None
                if added and added[0] == last and last in wording.special:
                    added = added[1:]  # the model ended its turn itself
                kind: Kind = "extends"
                if parent.children:
                    kind = self._kind(asked, keys)
                    kind = kind if kind in ("edited", "compacted") else "branch"
                return Continuation(parent, kind, added, keys[longest:], beginnings[-1])
        kind = "template" if longest else self._kind(asked, keys)
        return Continuation(
            None, kind, wording.render(asked.messages, asked.tools), [*keys], beginnings[-1]
        )

    def _kind(self, asked: Asked, keys: Sequence[bytes]) -> Kind:
        """Returns the kind of a chat that extends nothing."""
        said = set(keys)
        likeliest: tuple[tuple[int, int, int], ModelCall, list[bytes]] | None = None
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
        return "tools" if kind == "branch" and asked.tools_key != call.asked.tools_key else kind

    def _open(self) -> Iterator[ModelCall]:
        """The newest chats that were not continued, running ones included."""
        found = 0
        for call in [*reversed(self.running), *reversed(self.calls)]:
            if call.asked.messages and not call.children:
                yield call
                found += 1
            if found == _LIKELY:
                return

    def _plain(self, prompt: str | tuple[int, ...], wording: ChatRenderer) -> Continuation:
        """A prompt that begins with an earlier one and its answer goes on behind those tokens."""
        best: tuple[int, ModelCall] | None = None
        for call in reversed(self.calls[-_LIKELY:]):
            length = _beginning(call, prompt)
            if length and (
                best is None or (length, not call.children) > (best[0], not best[1].children)
            ):
                best = length, call
        if best is None:
            return Continuation(
                None, "new", wording.encode(prompt) if isinstance(prompt, str) else prompt, [], b""
            )
        length, call = best
        kind: Kind = "branch" if call.children else "extends"
        if not isinstance(prompt, str):
            return Continuation(call, kind, prompt[length:], [], b"")
        rest = wording.encode_more(prompt[length:]) if prompt[length:] else ()
        last = call.token_ids[-1] if call.token_ids else None
        if last not in wording.special:
            return Continuation(call, kind, rest, [], b"")
        if rest and rest[0] == last:  # the agent writes the model's end token itself
            return Continuation(call, kind, rest[1:], [], b"")
        # the model's end was taken away
        return Continuation(None, "edited", wording.encode(prompt), [], b"")


def _beginning(call: ModelCall, prompt: str | tuple[int, ...]) -> int:
    """How much of the prompt is this call with its answer, in characters or tokens; 0 where it begins otherwise."""
    if call.asked.prompt is None:
        return 0
    if isinstance(prompt, str):
        was = call.asked.prompt + call.text if isinstance(call.asked.prompt, str) else None
        return len(was) if was and prompt.startswith(was) else 0
    ids = tuple(call.tokens())
    return len(ids) if prompt[: len(ids)] == ids else 0
