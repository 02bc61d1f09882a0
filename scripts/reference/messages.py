"""The messages of the wire as tables of their fields, with what the source says beside each."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from pydantic import BaseModel
from text import link, table

from swift_r1.serving import answers, openai_messages
from swift_r1.serving.protocols import messages as anthropic_messages
from swift_r1.serving.protocols import responses
from swift_r1.wire import protocol, sessions

BY_NAME: dict[str, type[BaseModel]] = {
    name: one
    for module in (
        *(protocol, sessions, openai_messages),
        *(anthropic_messages, responses, answers),
    )
    for name, one in vars(module).items()
    if inspect.isclass(one) and issubclass(one, BaseModel)
}
_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_ATTRIBUTE = re.compile(r"^ {8}(\w+(?:, \w+)*): (.*(?:\n {12}.*)*)", re.MULTILINE)


def message(model: type[BaseModel]) -> tuple[str, set[str]]:
    """The section of a message, and the names of those that it holds."""
    schema, held = model.model_json_schema(), set[str]()
    about, _, _ = inspect.cleandoc(model.__doc__ or "").partition("\n\nAttributes:")
    notes, required, rows = _notes(model), schema.get("required", ()), []
    for name, one in schema.get("properties", {}).items():
        given = "required" if name in required else ""
        if not given and one.get("default") is not None and one["default"] not in ([], {}, ""):
            given = f"`{json.dumps(one['default'])}`"
        rows.append((f"`{name}`", typed(one, held), given, notes.get(name, "")))
    body = about if model.__doc__ != BaseModel.__doc__ else ""
    parts = [
        f"### {model.__name__}",
        *([body] if body else []),
        table(("field", "type", "default", "what it is"), rows),
    ]
    return "\n\n".join(parts), held


def typed(schema: dict[str, Any], held: set[str]) -> str:
    """A JSON schema in words; the messages in it are added to `held`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        held.add(name)
        return link(name)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(
            dict.fromkeys(typed(one, held) for one in options if one != {"type": "null"})
        )
    if "const" in schema or "enum" in schema:
        return ", ".join(
            f"`{json.dumps(one)}`" for one in schema.get("enum", [schema.get("const")])
        )
    kind = schema.get("type", "JSON")
    if kind == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(typed(one, held) for one in schema['prefixItems'])}]"
        return f"list of {typed(schema.get('items', {}), held)}"
    limits = ", ".join(
        f"{sign} {_number(schema[name])}" for name, sign in _LIMITS.items() if name in schema
    )
    return f"{'text' if kind == 'string' else kind}{' ' + limits if limits else ''}"


def _number(value: float) -> str:
    power = int(value).bit_length() - 1
    return f"2^{power}" if power > 20 and value == 1 << power else f"{value:g}"


def _notes(model: type[BaseModel]) -> dict[str, str]:
    """What a class says of its fields: a comment behind or above one, or an entry under `Attributes:`."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if cls is BaseModel or not issubclass(cls, BaseModel):
            continue
        lines = inspect.getsource(cls).splitlines()
        for line in lines:
            if match := re.match(r"    (\w+): .*?  # (.*)", line):
                found[match[1]] = match[2]
        for names, text in _ATTRIBUTE.findall(cls.__doc__ or ""):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found
