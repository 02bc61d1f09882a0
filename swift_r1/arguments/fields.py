"""What one flag is: a dataclass field with its help, limits, aliases and choices as metadata."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from functools import cache
from typing import Any

_KEY = "swift_r1.flag"


@dataclass(frozen=True, slots=True)
class FlagInfo:
    """The metadata of one flag.

    Attributes:
        help: one line for `--help`.
        choices: the allowed values (empty: any).
        aliases: other spellings of the flag.
        required: must be given on the command line or in the config file.
        at_least, more_than, at_most, less_than: limits of a number, each checked on list items too.
        ms_swift: ms-swift's default where it differs from ours, as text for the help.
        secret: never written to a file or shown.
        synonyms: ms-swift's words for some of the choices.
        elsewhere: ms-swift's words for what other flags do here, and how that is written.
        objects: items of the list may be JSON objects; in a config file they are written as such.
    """

    help: str
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    required: bool = False
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    ms_swift: str | None = None
    secret: bool = False
    objects: bool = False
    synonyms: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag of one command. `kind` is `bool`, `int`, `float`, `str` or `dict`; with `is_list`, a list of those."""

    name: str
    kind: type
    is_list: bool
    optional: bool
    default: Any
    group: str
    info: FlagInfo


def flag(default: Any, help: str, **info: Any) -> Any:
    """A dataclass field that is a command-line flag; `info` are the other fields of `FlagInfo`."""
    about = FlagInfo(help=help, **info)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={_KEY: about})
    return dataclasses.field(default=default, metadata={_KEY: about}, repr=not about.secret)


@cache
def flag_specs(cls: type) -> Mapping[str, FlagSpec]:
    """The flags of a command's argument class by name, in the order of its groups."""
    hints = typing.get_type_hints(cls)
    groups = _groups(cls)
    specs: dict[str, FlagSpec] = {}
    for item in dataclasses.fields(cls):
        kind, is_list, optional = _kind(hints[item.name])
        default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
        specs[item.name] = FlagSpec(item.name, kind, is_list, optional, default, groups[item.name], item.metadata[_KEY])
    return specs


def spellings(cls: type) -> Mapping[str, FlagSpec]:
    """Every accepted spelling (names and aliases, without dashes) of a command's flags."""
    specs = flag_specs(cls)
    return {name: spec for spec in specs.values() for name in (spec.name, *spec.info.aliases)}


def _groups(cls: type) -> dict[str, str]:
    """Each field's group: the first docstring line of the class that declares it."""
    groups: dict[str, str] = {}
    for base in cls.__mro__:
        for name in inspect.get_annotations(base):
            groups.setdefault(name, (base.__doc__ or base.__name__).splitlines()[0].rstrip("."))
    return groups


def _kind(hint: Any) -> tuple[type, bool, bool]:
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        (hint,) = members
    origin = typing.get_origin(hint)
    if origin is list:
        return typing.get_args(hint)[0], True, optional
    return (origin or hint), False, optional
