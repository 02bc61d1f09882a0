"""How completions are shown to OpenAI's clients: as chat messages with tool calls, or as texts; whole or in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from swift_r1.plugins.tools.parsing import ToolCallParser
from swift_r1.serving import openai_messages as messages
from swift_r1.serving.engines.base import Piece
from swift_r1.serving.openai_messages import ChatRequest, CompletionRequest
from swift_r1.serving.tool_calls import CallReader


class AnswerShape(Protocol):
    """Of one request. `kind` begins the ids of its answers, `whole` and `chunk` are OpenAI's names of the objects."""

    kind: str
    whole: str
    chunk: str

    def choice(self, number: int, one: Piece) -> dict[str, Any]:
        """A whole completion."""

    def delta(self, number: int, piece: Piece, first: bool, offset: int) -> dict[str, Any]:
        """The next piece of a completion, of whose text `offset` characters were shown."""


class ChatShown:
    """With a `parser` calls of tools are looked for."""

    kind = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, prompt: Sequence[int], parser: ToolCallParser | None) -> None:
        self._logprobs = body.logprobs
        self._calls: CallReader | None = None
        if parser is not None:
            self._calls = CallReader(parser, body.template_tools, prompt, body.parallel_tool_calls is not False)

    def choice(self, number: int, one: Piece) -> dict[str, Any]:
        return messages.chat_choice(number, one, self._logprobs, self._calls.whole(one) if self._calls else None)

    def message(self, one: Piece) -> dict[str, Any]:
        """The completion as a message of the conversation."""
        shown = self.choice(0, one)["message"]
        return {name: value for name, value in shown.items() if name in ("role", "content") or value}

    def delta(self, number: int, piece: Piece, first: bool, offset: int) -> dict[str, Any]:
        parsed = self._calls.piece(number, piece) if self._calls else None
        return messages.chat_delta(number, piece, first, self._logprobs, parsed)


class TextShown:
    kind = "cmpl"
    whole = "text_completion"
    chunk = "text_completion"

    def __init__(self, body: CompletionRequest) -> None:
        self._logprobs = body.logprobs is not None

    def choice(self, number: int, one: Piece) -> dict[str, Any]:
        return messages.completion_choice(number, one, self._logprobs)

    def delta(self, number: int, piece: Piece, first: bool, offset: int) -> dict[str, Any]:
        return messages.completion_choice(number, piece, self._logprobs, offset)
