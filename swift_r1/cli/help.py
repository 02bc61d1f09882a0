"""The text of `swift COMMAND --help`, made from the flags themselves."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby

from swift_r1.flags.fields import FlagSpec, flag_specs

_WIDTH = 118
_NAME_WIDTH = 42


def command_help(
    usage: str,
    cls: type | None = None,
    examples: str = "",
    only: Sequence[str] | None = None,
    refused: Callable[[str], object] = lambda _name: None,
) -> str:
    """Returns usage, examples, the flags by group with their defaults, and which defaults are not ms-swift's.

    Args:
        cls: the argument class of a command that takes flags.
        only: the groups to show, in their order; all by default.
        refused: says of a flag's name whether the command does not take it.
    """
    if cls is None:
        return usage
    specs = [spec for spec in flag_specs(cls).values() if not refused(spec.name)]
    if only is not None:
        specs = sorted(
            (spec for spec in specs if spec.group in only), key=lambda spec: only.index(spec.group)
        )

    parts = [usage, "", "Examples:", textwrap.indent(textwrap.dedent(examples).strip(), "  ")]
    for group, members in groupby(specs, key=lambda spec: spec.group):
        parts += ["", f"{group}:", *(_flag_lines(spec) for spec in members)]

    differing = [spec for spec in specs if spec.info.ms_swift is not None]
    if differing:
        parts += ["", "Defaults that are not ms-swift's:"]
    for spec in differing:
        parts.append(f"  --{spec.name} {shown(spec.default)} (ms-swift: {spec.info.ms_swift})")
    return "\n".join(parts)


def _flag_lines(spec: FlagSpec) -> str:
    """Returns a flag's lines: its names and kind of value on the left, what it does on the right."""
    info = spec.info
    names = " | ".join(f"--{name}" for name in (spec.name, *info.aliases))
    value = {bool: "true|false", int: "N", float: "X", dict: "JSON"}.get(spec.kind, "TEXT")
    left = f"  {names} {value}{' ...' if spec.is_list else ''}"

    text = info.help
    if info.choices and not info.required:
        text += f"; one of {', '.join(map(str, info.choices))}"
    if info.required:
        text += " [required]"
    elif spec.default not in (None, "", [], {}):
        text += f" [{shown(spec.default)}]"

    lines = textwrap.wrap(text, _WIDTH - _NAME_WIDTH)
    indent = " " * _NAME_WIDTH
    if len(left) < _NAME_WIDTH:
        return left.ljust(_NAME_WIDTH) + f"\n{indent}".join(lines)
    return "\n".join([left, *(indent + line for line in lines)])


def shown(value: object) -> str:
    """Returns a default as it is written on the command line."""
    if isinstance(value, bool | dict):
        return json.dumps(value)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
