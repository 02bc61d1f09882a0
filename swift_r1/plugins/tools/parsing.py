"""The tool calls in a model's text, found by vLLM's own parsers; which parser belongs to a chat template.

vLLM's parsers are imported where the first one is made, which takes some seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from copy import copy
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
    ("lfm2", ("<|tool_list_start|>",)),
    ("internlm", ("<|action_start|>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("phi4_mini_json", ("functools[",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("Environment: ipython",)),
    ("jamba", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
)


# Of calls in any of these formats, and some more.
_ATTEMPT = re.compile(
    r"tool_?call|tool▁call|<function|<invoke|<start_function|<\|action_start\|>|\[TOOL_CALLS\]|functools\[|<\|python_tag\|>"
    r"|^\s*\[\w+\(|\"name\"\s*:[^\n]*\"(?:arguments|parameters)\"\s*:",
    re.IGNORECASE,
)
_THOUGHT = re.compile(r"\s*<([\w:]*(?:think|thought|reason)[\w:]*)>.*?</\1>", re.DOTALL)


def _spoken(text: str, opening: str = "") -> tuple[str, str]:
    """Returns what a turn thinks at its beginning, of which the prompt may have the `opening`, and what it says: a call
    in a thought is none."""
    end = max(0, found.end() - len(opening)) if (found := _THOUGHT.match(opening + text)) else 0
    return text[:end], text[end:]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it; `arguments` is JSON text, mostly an object."""

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """OpenAI's entry of `tool_calls`."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class Parsed:
    """A model's turn: what it says besides its calls (None for nothing), and the calls."""

    content: str | None
    calls: tuple[ToolCall, ...] = ()

    @property
    def unread(self) -> bool:
        """Returns whether a turn says what looks like a call, in whatever format, and no call was found."""
        return not self.calls and _ATTEMPT.search(_spoken(self.content or "")[1]) is not None


def guessed_parser(template: str) -> tuple[str, str] | None:
    """Returns the parser for a chat template, and the sign in its text that tells; None for none."""
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return name, " with ".join(signs)
    return None


def chosen_parser(given: str | None, template: str) -> tuple[str | None, str]:
    """Returns the parser that is given, else guessed, and a word on why; None where the template has no known sign."""
    if given is not None:
        return given, "--tool_call_parser"
    guess = guessed_parser(template)
    return (
        (guess[0], f"the chat template has {guess[1]}")
        if guess
        else (None, "no known sign in the chat template")
    )


class ToolCallParser:
    """vLLM's parser `name` over the model's tokenizer; `opening` is the start of a thought that prompts end with, where
    turns come without it.

    Raises UsageError: there is no vLLM, no such parser, or it is not for this model.
    """

    def __init__(self, name: str, tokenizer: Any, opening: str = "") -> None:
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise UsageError(
                f"tool calls are parsed by vLLM, which is not installed here ({error})"
            ) from error
        # A call that is not JSON is the model's doing, and no error of the program with a traceback.
        for place in ("vllm.tool_parsers", "vllm.parser"):
            logging.getLogger(place).setLevel(logging.CRITICAL)
        known = ToolParserManager.list_registered()
        if name not in known:
            raise UsageError(
                f"--tool_call_parser {name}: vLLM has no such parser; it has {', '.join(known)}"
            )
        # Each parser looks into the vocabulary, which takes 0.1 s to list: once for all of them.
        vocabulary = tokenizer.get_vocab()
        self._tokenizer = copy(tokenizer)
        self._tokenizer.get_vocab = lambda: vocabulary
        self.name = name
        self._opening = opening
        self._request: Any = ChatCompletionRequest
        try:
            self._parser: Any = ToolParserManager.get_tool_parser(name)
            request, parser = self._made(())
            parser.extract_tool_calls("", request)
        except Exception as error:
            why = (
                "vLLM reads that format elsewhere"
                if isinstance(error, NotImplementedError)
                else one_line(error)
            )
            raise UsageError(
                f"--tool_call_parser {name} cannot be used with this model: {why}"
            ) from error

    def parse(self, text: str, tools: Sequence[Tool] = (), token_ids: Sequence[int] = ()) -> Parsed:
        """Returns the calls of a whole turn. `text` has its special tokens, but not the one that ends the turn;
        `token_ids` are the turn's and those before it, from which the calls get ids that repeat in a repeated
        conversation."""
        thought, spoken = _spoken(text, self._opening)
        try:
            request, parser = self._made(tools)
            found = parser.extract_tool_calls(spoken, request)
        except Exception as error:  # noqa: BLE001 - a parser may stumble over anything that a model writes
            _logger.warning(
                "the parser %s failed (%s): the turn is taken as text", self.name, one_line(error)
            )
            return Parsed(text or None)
        if not found.tools_called or not found.tool_calls:
            return Parsed(text or None)
        calls = [
            # Some formats have ids in the model's text, which its template writes again.
            ToolCall(
                one.id if one.id and one.id in text else call_id(token_ids, place),
                one.function.name,
                one.function.arguments,
            )
            for place, one in enumerate(found.tool_calls)
        ]
        return Parsed(thought + (found.content or "") or None, tuple(calls))

    def forced(self, tools: Sequence[Tool], choice: Choice) -> str | None:
        """Returns the structural tag (xgrammar's, JSON) with which a turn must make a call; None where vLLM has none
        for this format."""
        # Arguments follow the schema; without this they are any JSON.
        strict = [{**one, "function": {**one["function"], "strict": True}} for one in tools]
        request, parser = self._made(strict, choice)
        tag = parser.get_structural_tag(request)
        return None if tag is None else str(tag.model_dump_json())

    def _made(self, tools: Sequence[Tool], choice: Choice = "auto") -> tuple[Any, Any]:
        """Returns the request as vLLM's parsers want to see it, and a parser, which keeps what it has read of one
        turn."""
        asked = {"model": "-", "messages": [{"role": "user", "content": "-"}]}
        given = {"tools": [dict(one) for one in tools], "tool_choice": choice} if tools else {}
        request = self._request(**asked, **given)
        return request, self._parser(self._tokenizer, request.tools)


def call_id(token_ids: Sequence[int], place: int) -> str:
    """Nine letters and digits, which is what the strictest templates (Mistral's) want."""
    return hashlib.blake2b(json.dumps([place, *token_ids]).encode()).hexdigest()[:9]
