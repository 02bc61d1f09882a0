"""Which parser reads the tool calls of the served model, and the calls in one request's answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from swift_r1.data.prompt_templates import opening_of, rendered, renders_tools, tool_template
from swift_r1.errors import UsageError
from swift_r1.plugins.tools.parsing import Parsed, StreamedTurn, ToolCallParser, chosen_parser
from swift_r1.serving.engines.base import Piece
from swift_r1.wire.protocol import HTTPError

_logger = logging.getLogger("swift_r1.serving")


class ToolCalls:
    """The parser of the served model. It is imported for the first request that has tools."""

    def __init__(self, name: str | None, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._found: asyncio.Task[ToolCallParser] | None = None
        self.name = name
        self.why = "--tool_call_parser"
        if name is None and renders_tools(tokenizer):
            self.name, self.why = chosen_parser(None, tool_template(tokenizer))

    def said(self) -> str:
        """One line for the log."""
        if self.name is not None:
            return f"tool calls are read by vLLM's parser {self.name} ({self.why})"
        if not renders_tools(self._tokenizer):
            return "requests with tools are refused: the model's chat template has no place for tools"
        return f"requests with tools are refused: {self.why}; --tool_call_parser names one"

    async def parser(self) -> ToolCallParser:
        """Raises HTTPError (400) where none is known, or it cannot be used."""
        if self.name is None:
            raise HTTPError(400, f"{self.said()}")
        if self._found is None:
            opening = opening_of(partial(rendered, self._tokenizer))
            made = asyncio.to_thread(ToolCallParser, self.name, self._tokenizer, opening)
            self._found = asyncio.ensure_future(made)
        try:
            return await asyncio.shield(self._found)
        except UsageError as error:
            raise HTTPError(400, str(error)) from error


class CallReader:
    """The calls in the completions of one request: in whole ones, or as they come."""

    def __init__(
        self, parser: ToolCallParser, tools: Sequence[dict[str, Any]], prompt: Sequence[int], parallel: bool
    ) -> None:
        self._parser = parser
        self._tools = tools
        self._prompt = prompt
        self._parallel = parallel
        self._streams: dict[int, StreamedTurn] = {}

    def whole(self, one: Piece) -> Parsed:
        return self._allowed(self._parser.parse(one.text, self._tools, (*self._prompt, *one.token_ids)))

    def piece(self, number: int, piece: Piece) -> Parsed:
        """Returns what the next piece of completion `number` adds."""
        if number not in self._streams:
            self._streams[number] = self._parser.stream(self._tools)
        stream = self._streams[number]
        added = stream.add(piece.text, piece.token_ids)
        if piece.finish_reason is None:
            return Parsed(added or None)
        ended = stream.end(self._prompt)
        return self._allowed(Parsed((added + (ended.content or "")) or None, ended.calls))

    def _allowed(self, parsed: Parsed) -> Parsed:
        """Without parallel calls only the first."""
        return parsed if self._parallel else Parsed(parsed.content, parsed.calls[:1])
