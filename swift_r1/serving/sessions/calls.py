"""A call of a session: what it says, the tokens that it adds to those of the call it goes on from, and its answer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from swift_r1.serving.sessions.history import Kind, Message, canonical, digest, keys_of
from swift_r1.wire.protocol import FinishReason, Routes, SamplingParams


class ChatRenderer(Protocol):
    """The model's chat template and tokenizer."""

    @property
    def special(self) -> frozenset[int]:
        """Tokens that are no text, among them those that end a turn."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]:
        """The whole conversation, with the opening of an answer."""

    def behind(
        self, messages: Sequence[Message], place: int, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...] | None:
        """Returns what follows the model's turn `messages[place]`, with the opening of an answer; None where the
        template cannot say."""

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token alone."""


@dataclass(frozen=True)
class CallContent:
    """Says what a call says. `settings` is all else that its answer depends on. Digests of it are taken once: a
    conversation may be long."""

    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _keyed(self) -> tuple[list[bytes], dict[str, int]]:
        ids: dict[str, int] = {}
        return keys_of(self.messages, ids), ids

    @property
    def keys(self) -> list[bytes]:
        """Returns the keys of its messages."""
        return self._keyed[0]

    def answer_key(self, answer: Message) -> bytes:
        """Returns the key of an answer behind the messages."""
        return keys_of([answer], dict(self._keyed[1]))[0]

    @cached_property
    def tools_key(self) -> bytes:
        """Equal where the template gets the same beside the messages."""
        arguments = self.settings.get("chat_template_kwargs")
        return digest(
            *(canonical(tool) for tool in (*self.tools, *([arguments] if arguments else [])))
        )

    @cached_property
    def digest(self) -> bytes:
        """Equal for calls that say the same."""
        return digest(self.tools_key, *self.keys, canonical(dict(self.settings)))


@dataclass(slots=True, eq=False)
class ModelCall:
    """A call, answered once `finish_reason` is there.

    Attributes:
        digest: of what it says; `repetition` numbers the calls that say the same.
        head: digest of its history, in the end with the answer.
        added: prompt tokens behind the parent's tokens.
        sampling: what was generated with.
        routes: of the tokens from number `read_before` on, where the session asks for them.
    """

    number: int
    kind: Kind
    parent: ModelCall | None
    depth: int  # calls before it in its line
    digest: bytes
    repetition: int
    seed: int | None
    content: CallContent
    head: bytes
    added: array[int]
    prompt_tokens: int
    began: float
    sampling: SamplingParams | None = None
    completion_id: str = ""
    children: int = 0  # calls that go on behind this one
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    versions: tuple[tuple[int, int], ...] = ()
    routes: Routes | None = None
    finish_reason: FinishReason | None = None
    text: str = ""
    answer: Message | None = None
    place: int | None = None  # of the answer among the messages
    seconds: float = 0.0
    held: int = 0  # bytes of `content` and `answer`

    def line(self) -> list[ModelCall]:
        """The calls from the first one to this."""
        calls: list[ModelCall] = [self]
        while (parent := calls[-1].parent) is not None:
            calls.append(parent)
        return calls[::-1]

    @property
    def read_before(self) -> int:
        """Returns how many tokens of its prompt the engine has read in earlier calls: the parent's without the last."""
        return 0 if self.parent is None else self.parent.read_after

    @property
    def read_after(self) -> int:
        """Returns how many of its tokens the engine has read: all but the last that it wrote."""
        return self.prompt_tokens + max(len(self.token_ids) - 1, 0)

    def tokens(self) -> list[int]:
        """Returns the tokens of the prompt and, once it is there, the answer."""
        together = array("i")
        for call in self.line():
            together += call.added + call.token_ids
        return together.tolist()
