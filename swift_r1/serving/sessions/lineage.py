"""Which earlier call a call goes on from, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swift_r1.serving.sessions.calls import CallContent, ChatRenderer, ModelCall
from swift_r1.serving.sessions.history import Kind, heads


@dataclass(frozen=True, slots=True)
class Continuation:
    """The place of a call: behind `parent`, with `added` as the tokens of its prompt behind that call's; `head` is the
    digest of its history."""

    parent: ModelCall | None
    kind: Kind
    added: Sequence[int]
    head: bytes


class Lineage:
    """The answered calls of a session by what they say, and the running ones."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self.running: list[ModelCall] = []
        self._by_head: dict[bytes, list[ModelCall]] = {}

    def answered(self, call: ModelCall) -> None:
        """The call is over, with the `head` of its answer."""
        self.running.remove(call)
        self.calls.append(call)
        self._by_head.setdefault(call.head, []).append(call)

    def failed(self, call: ModelCall) -> None:
        """The call is as if it had never been, answered or not."""
        if call in self.running:
            self.running.remove(call)
            return
        self.calls.remove(call)
        self._by_head[call.head].remove(call)

    def place(self, content: CallContent, renderer: ChatRenderer) -> Continuation:
        beginnings = list(heads(content.tools_key, content.keys))
        messages = content.messages
        longest = next(
            (
                place
                for place in range(len(messages), 0, -1)
                if self._by_head.get(beginnings[place])
            ),
            0,
        )
        if longest:
            # Where several said the same, the choice does not depend on which was answered first.
            parent = min(
                self._by_head[beginnings[longest]],
                key=lambda call: (call.children, call.digest, call.repetition),
            )
            added = renderer.behind(messages, longest - 1, content.tools)
            if added is not None:
                last = parent.token_ids[-1] if parent.token_ids else None
                if added and added[0] == last and last in renderer.special:
                    added = added[1:]  # the model ended its turn itself
                kind: Kind = "branch" if parent.children else "extends"
                return Continuation(parent, kind, added, beginnings[-1])
        return Continuation(None, "new", renderer.render(messages, content.tools), beginnings[-1])
