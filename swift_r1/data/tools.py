"""`--agent_template`: a row's tools described in the system message, with the form in which the model calls them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_THOUGHTS = {"react_en": "Thought: what to do next", "react_grpo": "<think>what to do next</think>"}
AGENT_TEMPLATES = tuple(_THOUGHTS)
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


def with_tools(messages: Sequence[dict[str, str]], tools: Any, template: str) -> list[dict[str, str]]:
    """The messages with `tools` in the system message, behind what is there, in the ReAct form (arXiv 2210.03629).

    `tools` are OpenAI's function descriptions, or their JSON, as a whole or one by one. Raises ValueError for others.
    """
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, Sequence):
        raise ValueError(f"tools is a {type(tools).__name__}, not a list")
    described = [_function(tool) for tool in tools]
    text = _FORM.format(
        tools="\n".join(_line(one) for one in described),
        names=", ".join(str(one["name"]) for one in described),
        thought=_THOUGHTS[template],
    )
    own, *rest = messages
    if own["role"] != "system":
        return [{"role": "system", "content": text}, own, *rest]
    return [{"role": "system", "content": f"{own['content']}\n\n{text}"}, *rest]


def _function(tool: Any) -> Mapping[str, Any]:
    tool = json.loads(tool) if isinstance(tool, str) else tool
    found = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(found, Mapping) or not found.get("name"):
        raise ValueError("a tool has no name")
    return found


def _line(tool: Mapping[str, Any]) -> str:
    parameters = json.dumps(tool.get("parameters") or {}, ensure_ascii=False)
    return f"{tool['name']}: {tool.get('description') or 'no description'} Parameters: {parameters}"
