"""What runs inside a worker process: one call of a tool, whose answer is text, whatever the tool does."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_type_hints

from swift_r1.data.tool_registry import tools
from swift_r1.errors import UsageError, describe, one_line
from swift_r1.workers.worker import guarded

Outcome = Literal["answer", "error", "timeout", "unknown", "unread"]


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a call gave.

    Attributes:
        content: what the model reads.
        outcome: whether that is the tool's answer, or why there is none.
        seconds: in the tool.
        cut: whether the tool gave more.
        cause: of an error, with the line that raised it, for the log.
    """

    content: str
    outcome: Outcome = "answer"
    seconds: float = 0.0
    cut: bool = False
    cause: str | None = None


def load_tools(load: Callable[[], object]) -> None:
    """Calls `load`, which registers tools in a worker. What it fails to is missing in `registered`."""
    with suppress(UsageError):
        load()


def registered() -> list[str]:
    """Returns the tools that this process has."""
    return list(tools)


def call_tool(name: str, arguments: str, limit: float, longest: int) -> ToolAnswer:
    """Calls a tool with the arguments of a model (JSON); the answer has at most `longest` characters and a mark. The
    parent kills this process after `limit` seconds."""
    cause = None
    with guarded(limit):
        started = time.perf_counter()
        try:
            content = _text(_called(name, arguments.strip() or "{}"))
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  a user's tool may raise anything, SystemExit too
            content = f"Error: {_why(error)}"
            cause = describe(error)
        seconds = time.perf_counter() - started
    content, cut = within(content, longest)
    return ToolAnswer(content, "answer" if cause is None else "error", seconds, cut, cause)


def within(content: str, longest: int) -> tuple[str, bool]:
    """Returns an answer as a model reads it, and whether something of it is cut off: so many characters, and a mark."""
    content = content.encode("utf-8", "replace").decode()  # half characters have no tokens
    more = len(content) - longest
    return (f"{content[:longest]} [{more} more characters]" if more > 0 else content), more > 0


class _BadArguments(ValueError):
    """The model's arguments are none."""


@cache
def _checked(name: str) -> Any:
    """Returns the tool, which refuses arguments that are not of its types; a list of JSON is a tuple too."""
    from pydantic import ConfigDict, TypeAdapter

    function: Any = tools[name]
    # pydantic does not look for the names of hints where the function is.
    getattr(function, "__func__", function).__annotations__ = get_type_hints(function)
    return TypeAdapter(function, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def _called(name: str, arguments: str) -> Any:
    if not arguments.startswith("{"):  # a list would be taken for arguments in their order
        raise _BadArguments("the arguments are not a JSON object")
    result = _checked(name).validate_json(arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _why(error: BaseException) -> str:
    """Returns one short line."""
    from pydantic import ValidationError

    text = one_line(error)
    if isinstance(error, _BadArguments | ValidationError) or text == type(error).__name__:
        return text
    return f"{type(error).__name__}: {text}"
