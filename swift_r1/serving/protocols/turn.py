"""The model's turn as the blocks that Anthropic's Messages and OpenAI's Responses have: thoughts, text, calls of tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from swift_r1.plugins.tools.parsing import Parsed, ToolCall, ToolCallParser
from swift_r1.serving.answers import unless_gone
from swift_r1.serving.engines.base import Piece, PromptTokenizer
from swift_r1.serving.openai_messages import CallReader, ChatRequest, writable
from swift_r1.serving.openai_routes import Served
from swift_r1.serving.pieces import Pieces, collected, joined
from swift_r1.serving.sessions.history import Message
from swift_r1.wire.protocol import HTTPError

BlockKind = Literal["thoughts", "text", "call"]
Step = Literal["begins", "grows", "ends"]
_OPEN = "<think>"
CLOSE = "</think>"
_TAIL = 32  # tokens at the end of a prompt, in which it may open a thought


@dataclass(slots=True)
class Block:
    """Thoughts or text as far as they came, or a call with the JSON text of its arguments."""

    kind: BlockKind
    text: str = ""
    call: ToolCall | None = None


class Turn:
    """Takes one completion apart, whole or as it comes. With `thinks` what the model writes in think tags, or behind one
    that the prompt has opened, is a block of its own. With `objects` a call whose arguments are no JSON object, which
    Anthropic's protocol has no place for, stays text."""

    def __init__(
        self,
        body: ChatRequest,
        prompts: PromptTokenizer,
        thinks: bool,
        objects: bool,
        prompt: Sequence[int],
        parser: ToolCallParser | None,
    ) -> None:
        self._calls: CallReader | None = None
        if parser is not None:
            parallel = body.parallel_tool_calls is not False
            self._calls = CallReader(parser, body.template_tools, prompt, parallel)
        self._thinks = thinks
        self._objects = objects
        self._opened = thinks and "".join(prompts.texts(prompt[-_TAIL:])).rstrip().endswith(_OPEN)
        self._reader = BlockReader(thinks, self._opened)
        self.came: list[Piece] = []

    @property
    def blocks(self) -> list[Block]:
        return self._reader.blocks

    @property
    def cut(self) -> bool:
        """Returns whether it ended at a limit."""
        return self.came[-1].finish_reason == "length"

    @property
    def tokens(self) -> int:
        """Returns how many the model wrote."""
        return sum(len(piece.token_ids) for piece in self.came)

    async def steps(self, pieces: Pieces) -> AsyncIterator[tuple[Step, int, str]]:
        """Yields what happens to blocks, by their places, as the pieces come. Raises as the pieces do."""
        begun = 0
        async for _, piece in pieces:
            for block, text in self.add(piece):
                place = next(n for n, one in enumerate(self.blocks) if one is block)
                if place == begun:
                    if place:
                        yield "ends", place - 1, ""
                    yield "begins", place, ""
                    begun += 1
                yield "grows", place, text
        yield "ends", begun - 1, ""

    def take(self, whole: Piece) -> None:
        """Takes the whole completion."""
        for _ in self.add(whole):
            pass

    def add(self, piece: Piece) -> Iterator[tuple[Block, str]]:
        """Yields the blocks that the next piece begins or goes on with, each with what it adds."""
        self.came.append(piece)
        parsed = Parsed(piece.text) if self._calls is None else self._calls.piece(0, piece)
        if not self._readable(parsed):
            parsed = Parsed(joined(self.came).text)
        yield from self._reader.add(parsed, piece.finish_reason is not None)

    def message(self, one: Piece) -> Message:
        """The completion as a message of the conversation."""
        parsed = Parsed(one.text) if self._calls is None else self._calls.whole(one)
        reader = BlockReader(self._thinks, self._opened)
        for _ in reader.add(parsed if self._readable(parsed) else Parsed(one.text), True):
            pass
        return message_of(reader.blocks)

    def _readable(self, parsed: Parsed) -> bool:
        return not self._objects or all(
            object_of(one.arguments) is not None for one in parsed.calls
        )


class BlockReader:
    """Divides a text that comes in parts into thoughts and what is said. White space alone is no block."""

    def __init__(self, thinks: bool, opened: bool) -> None:
        self.blocks: list[Block] = []
        self._kind: BlockKind | None = None if thinks else "text"  # None: not known yet
        if opened:
            self._kind = "thoughts"
        self._held = ""
        self._thought = False  # whether a thought has ended

    def add(self, parsed: Parsed, ended: bool) -> Iterator[tuple[Block, str]]:
        self._held += parsed.content or ""
        if self._kind is None:
            start = self._held.lstrip()
            if start.startswith(_OPEN):
                self._kind = "thoughts"
                self._held = start.removeprefix(_OPEN)
            elif ended or not _OPEN.startswith(start):
                self._kind = "text"
        if self._kind == "thoughts":
            thought, tag, rest = self._held.partition(CLOSE)
            self._held = rest
            if not tag and not ended:
                kept = _begun(thought)
                self._held = thought[len(thought) - kept :]
                thought = thought[: len(thought) - kept]
            yield from self._grown("thoughts", thought)
            if tag:
                self._kind = "text"
                self._thought = True
        if self._kind == "text":
            said = self._held
            self._held = ""
            yield from self._grown("text", said)
        for call in parsed.calls:
            self.blocks.append(Block("call", call=call))
            yield from self._grown("call", call.arguments)
        if ended and not self.blocks:
            self.blocks.append(Block("text"))
            yield self.blocks[-1], ""

    def _grown(self, kind: BlockKind, text: str) -> Iterator[tuple[Block, str]]:
        if not self.blocks or self.blocks[-1].kind != kind:
            if not text.strip():
                self._held = text + self._held
                return
            if kind == "thoughts" or self.blocks or self._thought:
                text = text.lstrip()
            self.blocks.append(Block(kind))
        block = self.blocks[-1]
        block.text += text
        if text or kind == "call":
            yield block, text


def _begun(text: str) -> int:
    """Returns how many characters at the end of a text begin the tag that closes a thought."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)


def object_of(arguments: str) -> dict[str, Any] | None:
    """Returns a call's arguments as a JSON object; None where they are none."""
    try:
        found = json.loads(arguments)
        json.dumps(writable(found), allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def message_of(blocks: Sequence[Block]) -> dict[str, Any]:
    """Returns the assistant's message of these blocks, in the words of a chat."""

    def joined(kind: BlockKind) -> str:
        return "".join(one.text for one in blocks if one.kind == kind)

    message: dict[str, Any] = {"role": "assistant", "content": joined("text")}
    thoughts = joined("thoughts")
    if thoughts:
        message["reasoning_content"] = thoughts
    calls = [one.call.as_message() for one in blocks if one.call is not None]
    if calls:
        message["tool_calls"] = calls
    return message


def chat_request(asked: Mapping[str, Any]) -> ChatRequest:
    """Returns the chat that a request of another protocol asks for. Raises HTTPError (400)."""
    try:
        return ChatRequest.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise HTTPError(400, f"{where}: {first['msg']}" if where else first["msg"]) from error


def thinking_arguments(model: Served, thinks: bool) -> dict[str, bool]:
    """Returns the arguments of the chat template that switch thoughts on or off: none where it has no such switch."""
    switch = {"enable_thinking": thinks}
    try:
        model.prompts.with_arguments(switch)
    except HTTPError:
        return {}
    return switch


class ShownAnswer(Protocol):
    """Shows one answer in a protocol's words."""

    def whole(self, one: Piece) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yields server-sent events, each with its `type`."""


async def answered(request: Request, stream: bool, pieces: Pieces, shown: ShownAnswer) -> Response:
    """Sends the answer. Raises HTTPError as the pieces do, unless its status has been sent."""
    if not stream:
        [one] = await unless_gone(request, collected(pieces))
        return JSONResponse(shown.whole(one))
    await unless_gone(request, pieces.start())

    async def lines() -> AsyncIterator[str]:
        async for event in shown.events():
            yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    return StreamingResponse(
        lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )
