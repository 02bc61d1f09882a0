"""The tool calls in a model's text, found by vLLM's own parsers; which parser belongs to a chat template.

vLLM's parsers are imported where the first one is made, which takes some seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swift_r1.errors import UsageError, one_line

_logger = logging.getLogger("swift_r1.tools")

Tool = Mapping[str, Any]
"""OpenAI's description of a tool: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
Choice = Literal["auto", "required"] | Mapping[str, Any]
"""`tool_choice`, except none; a mapping names the function."""

# Signs in a template that only models of one format have. The first parser whose signs are all there is taken.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("internlm", ("<|action_start|>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("phi4_mini_json", ("functools[",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("Environment: ipython",)),
    ("jamba", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it; `arguments` is JSON text, mostly an object."""

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """OpenAI's entry of `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Parsed:
    """A model's turn: what it says besides its calls (None for nothing), and the calls."""

    content: str | None
    calls: tuple[ToolCall, ...] = ()


def guessed_parser(template: str) -> tuple[str, str] | None:
    """The parser for a chat template, and the sign in its text that tells; None for none."""
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return name, " with ".join(signs)
    return None


class ToolCallParser:
    """vLLM's parser `name` over the model's tokenizer.

    Raises UsageError: there is no vLLM, no such parser, or it is not for this model.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise UsageError(f"tool calls are parsed by vLLM, which is not installed here ({error})") from error
        # A call that is no JSON is the model's doing, and no error of the program with a traceback.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        known = ToolParserManager.list_registered()
        if name not in known:
            raise UsageError(f"--tool_call_parser {name}: vLLM has no such parser; it has {', '.join(known)}")
        self.name, self._tokenizer = name, tokenizer
        self._request: Any = ChatCompletionRequest
        try:
            self._parser: Any = ToolParserManager.get_tool_parser(name)
            request, parser = self._made(())
            parser.extract_tool_calls("", request)
        except Exception as error:
            why = "vLLM reads that format elsewhere" if isinstance(error, NotImplementedError) else one_line(error)
            raise UsageError(f"--tool_call_parser {name} cannot be used with this model: {why}") from error

    def parse(self, text: str, tools: Sequence[Tool] = (), token_ids: Sequence[int] = ()) -> Parsed:
        """The calls of a whole turn. `text` has its special tokens, but not the one that ends the turn; `token_ids`
        are the turn's and those before it, from which the calls get ids that repeat in a repeated conversation."""
        request, parser = self._made(tools)
        try:
            found = parser.extract_tool_calls(text, request)
        except Exception as error:  # noqa: BLE001 - a parser may stumble over anything that a model writes
            _logger.warning("the parser %s failed (%s): the turn is taken as text", self.name, one_line(error))
            return Parsed(text or None)
        if not found.tools_called or not found.tool_calls:
            return Parsed(text or None)
        calls = [
            # Some formats have ids in the model's text, which its template writes again.
            ToolCall(
                one.id if one.id and one.id in text else _call_id(token_ids, place),
                one.function.name,
                one.function.arguments,
            )
            for place, one in enumerate(found.tool_calls)
        ]
        return Parsed(found.content or None, tuple(calls))

    def stream(self, tools: Sequence[Tool]) -> StreamedTurn:
        return StreamedTurn(self, *self._made(tools), tools)

    def forced(self, tools: Sequence[Tool], choice: Choice) -> str | None:
        """The structural tag (xgrammar's, JSON) with which a turn must make a call; None where vLLM has none for this
        format."""
        # Arguments follow the schema; without this they are any JSON.
        strict = [{**one, "function": {**one["function"], "strict": True}} for one in tools]
        request, parser = self._made(strict, choice)
        tag = parser.get_structural_tag(request)
        return None if tag is None else str(tag.model_dump_json())

    def _made(self, tools: Sequence[Tool], choice: Choice = "auto") -> tuple[Any, Any]:
        """The request as vLLM's parsers want to see it, and a parser, which keeps what it has read of one turn."""
        asked = {"model": "-", "messages": [{"role": "user", "content": "-"}]}
        given = {"tools": [dict(one) for one in tools], "tool_choice": choice} if tools else {}
        request = self._request(**asked, **given)
        return request, self._parser(self._tokenizer, request.tools)


class StreamedTurn:
    """A turn that comes in pieces: its text is given out as it comes, as far as it can be no call; the calls are found
    in the whole, so that a stream says what the whole answer says."""

    def __init__(self, owner: ToolCallParser, request: Any, parser: Any, tools: Sequence[Tool]) -> None:
        self._owner, self._request, self._parser, self._tools = owner, request, parser, tools
        self._text, self._given = "", ""
        self._ids: list[int] = []

    def add(self, text: str, token_ids: Sequence[int]) -> str:
        """The text that the next piece brings, which may be none."""
        before, ids = self._text, list(self._ids)
        self._text += text
        self._ids += token_ids
        if not text:
            return ""
        try:
            found = self._parser.extract_tool_calls_streaming(
                before, self._text, text, ids, self._ids, list(token_ids), self._request
            )
        except Exception as error:  # noqa: BLE001 - as in `parse`; the end says what is left
            _logger.warning("the parser %s failed on a piece of a stream (%s)", self._owner.name, one_line(error))
            return ""
        new = (found.content or "") if found is not None else ""
        self._given += new
        return str(new)

    def end(self, prompt: Sequence[int]) -> Parsed:
        """What is left to say at the end, and the calls."""
        whole = self._owner.parse(self._text, self._tools, (*prompt, *self._ids))
        content = whole.content or ""
        left = content[len(self._given) :] if content.startswith(self._given) else ""
        return Parsed(left or None, whole.calls)


def _call_id(token_ids: Sequence[int], place: int) -> str:
    """Nine letters and digits, which is what the strictest templates (Mistral's) want."""
    found = hashlib.blake2b(digest_size=4)
    found.update(json.dumps(list(token_ids)).encode())
    return f"{found.hexdigest()[:7]}{place:02d}"[:9]


def with_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as chat templates want them: the arguments of a tool call as an object, where they are the JSON of
    one, and content that is text."""
    return [_for_template(message) for message in messages]


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(message)
    if calls := own.get("tool_calls"):
        own["tool_calls"] = [{**one, "function": _with_object(one["function"])} for one in calls]
        own["content"] = own.get("content") or ""
    return own


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments or "{}")
        except ValueError:  # the model wrote it, and reads it again as it was
            return dict(function)
        return {**function, "arguments": read} if isinstance(read, dict) else dict(function)
    return dict(function)
