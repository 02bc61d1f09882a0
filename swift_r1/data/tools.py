"""Tools in rows: the column that names or describes them, calls and answers in messages, and `--agent_template`, which
describes tools in the system message instead of leaving that to the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_r1.data.preprocessors import LEARNED_KEYS, TOOL_CALL_KEYS, RowFault
from swift_r1.data.prompt_templates import answered_calls, answered_turns, text_of
from swift_r1.data.tool_registry import described, server_tools, tools
from swift_r1.errors import UsageError, a_kind

_THOUGHTS = {"react_en": "Thought: what to do next", "react_grpo": "<think>what to do next</think>"}
AGENT_TEMPLATES = tuple(_THOUGHTS)
CALL_ROLES = ("tool_call", "function_call")  # ms-swift's and ShareGPT's
ANSWER_ROLES = (
    "tool",
    "tool_response",
    "function",
    "function_response",
    "observation",
    "observations",
)
_OF_ANSWERS = ("tool_call_id", "name")
_FORM = """Answer the question; the tools below help with it.

{tools}

Write in this form:

Question: the question
{thought}
Action: a tool, one of [{names}]
Action Input: what it is called with, as JSON
Observation: what it gave back
(as many calls as it takes)
{thought}
Final Answer: the answer"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the tools of rows come into their prompts.

    Attributes:
        agent_template: describes them in the system message; None: the chat template renders them.
        names: registered tools of rows without a column `tools`, which also have all tools of MCP servers.
        called: the run calls them, so that each must be a registered one.
    """

    agent_template: str | None = None
    names: tuple[str, ...] = ()
    called: bool = False

    def identity(self) -> list[Any]:
        """Returns what prepared rows depend on."""
        return [
            self.agent_template,
            self.names,
            self.called,
            [described(name) for name in sorted(tools)],
        ]

    def descriptions(self, column: Any) -> list[dict[str, Any]]:
        """OpenAI's descriptions of a row's tools. Its column is a list, or the JSON of one, of names of registered
        tools and of descriptions (or their JSON). Raises RowFault for anything else, or an unknown name."""
        column = _read(column, "the column tools")
        if column is None or not len(column):
            return [
                described(_known(name)) for name in dict.fromkeys((*self.names, *server_tools()))
            ]
        if isinstance(column, Mapping) or not isinstance(column, Sequence):
            raise RowFault(f"tools is {a_kind(column)}, not a list")
        found = [self._description(one) for one in column]
        names = [one["function"]["name"] for one in found]
        if len(set(names)) < len(names):
            raise RowFault("two tools have the same name")
        return found

    def _description(self, tool: Any) -> dict[str, Any]:
        if isinstance(tool, str) and not tool.lstrip().startswith("{"):
            return described(_known(tool))
        tool = _read(tool, "a tool")
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        own = dict(function) if isinstance(function, Mapping) else {}
        if "name_for_model" in own:  # ms-swift's older form
            own = {"name": own.pop("name_for_model")} | own
            own.pop("name_for_human", None)
        name = own.get("name")
        if not isinstance(name, str) or not name:
            raise RowFault("a tool has no name")
        if self.called:
            _known(name)
        own["parameters"] = _read(own.get("parameters"), f"the parameters of {name}")
        for part, kind, what in (
            ("parameters", Mapping, "an object"),
            ("description", str, "text"),
        ):
            if own.get(part) is None:
                own.pop(part, None)
            elif not isinstance(own[part], kind):
                raise RowFault(f"the {part} of {name} are not {what}")
        return {"type": "function", "function": own}


def _known(name: str) -> str:
    if name not in tools:
        raise RowFault(
            f"there is no tool {name}; plugins have registered {', '.join(sorted(tools)) or 'none'}"
        )
    return name


def _read(value: Any, what: str) -> Any:
    """Returns a value that may be JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise RowFault(f"{what} is not JSON") from None


def with_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages in OpenAI's form: a `tool_call` of ms-swift joins the assistant's message before it, or makes
    one; answers come in the order of their calls, and name them. Raises RowFault for a call that is none, and for an
    answer to none."""
    found: list[dict[str, Any]] = []
    number = 0
    for message in messages:
        role = message.get("role")
        if role in ANSWER_ROLES:
            content = message.get("content")
            text = None if content is None else _answer_text(content)
            named = {key: message[key] for key in _OF_ANSWERS if message.get(key)}
            found.append({"role": "tool", "content": text, **named})
            continue
        calls = _calls(message)
        if role in CALL_ROLES:
            if not found or found[-1]["role"] != "assistant":
                learned = {key: message[key] for key in LEARNED_KEYS if key in message}
                found.append({"role": "assistant", "content": "", **learned})
            own = found[-1]
        else:
            own = {
                key: value
                for key, value in message.items()
                if key not in ("tool_calls", "function_call")
            }
            found.append(own)
        if calls:
            own.setdefault("tool_calls", []).extend(calls)
            own["content"] = own.get("content") or ""
    for place, places in answered_turns(found):
        calls = found[place]["tool_calls"]
        answers = [found[one] for one in places]
        try:
            numbers = answered_calls(
                [call["id"] for call in calls], [one.get("tool_call_id") for one in answers]
            )
        except UsageError as error:
            raise RowFault(str(error)) from None
        for call in calls:
            # nine characters, which Mistral's template asks for
            call["id"] = call["id"] or f"call{number:05d}"
            number += 1
        for to, answer in zip(numbers, answers, strict=True):
            found[places[to]] = answer
            if to < len(calls):
                answer["tool_call_id"] = calls[to]["id"]
                answer.setdefault("name", calls[to]["function"]["name"])
    return found


def _answer_text(content: Any) -> str:
    try:
        return text_of(content)
    except ValueError:  # whatever the tool gave
        return json.dumps(content, ensure_ascii=False)


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the calls in one message, with arguments as JSON text."""
    said = ("content",) if message.get("role") in CALL_ROLES else TOOL_CALL_KEYS
    read = [_read(message[key], "a tool call") for key in said if message.get(key)]
    calls = []
    for one in (
        one for some in read for one in (some if isinstance(some, list | tuple) else [some])
    ):
        one = _read(one, "a tool call")
        one = one if isinstance(one, Mapping) else {}
        function = one.get("function", one)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowFault("a tool call has no name")
        arguments = function.get("arguments", function.get("parameters")) or {}
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        own = {"name": function["name"], "arguments": text}
        calls.append({"id": one.get("id") or "", "type": "function", "function": own})
    return calls


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], template: str
) -> list[dict[str, Any]]:
    """Returns the messages with the descriptions in the system message, behind what is there, in the ReAct form (arXiv
    2210.03629)."""
    functions = [one["function"] for one in tools]
    text = _FORM.format(
        tools="\n".join(_line(one) for one in functions),
        names=", ".join(str(one["name"]) for one in functions),
        thought=_THOUGHTS[template],
    )
    own, *rest = messages
    if own["role"] != "system":
        return [{"role": "system", "content": text}, own, *rest]
    return [{"role": "system", "content": f"{own['content']}\n\n{text}"}, *rest]


def _line(tool: Mapping[str, Any]) -> str:
    parameters = json.dumps(tool.get("parameters") or {}, ensure_ascii=False)
    return f"{tool['name']}: {tool.get('description') or 'no description'} Parameters: {parameters}"
