"""Command line and config file to one argument object, with all faults reported together.

Syntax: `--flag value`, `--flag=value`, `--list a b`, dashes or underscores, `--switch` alone for true,
and one config file (YAML or JSON) first; flags win over it. A flag given twice is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from swift_r1.arguments.convert import from_config, from_words
from swift_r1.arguments.fields import flag_specs, spellings
from swift_r1.arguments.ms_swift_flags import MS_SWIFT_GRPO_FLAGS, refusal
from swift_r1.arguments.world import World
from swift_r1.errors import UsageError

_FLAG = re.compile(r"--?[A-Za-z][\w-]*(=.*)?$", re.DOTALL)
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with the arguments. It is dropped where one of `flags` has a fault of its own already."""

    text: str
    flags: tuple[str, ...] = ()


class Arguments(Protocol):
    """What `parse_arguments` asks of an argument class beside being a dataclass of flags."""

    command: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def faults(self, given: frozenset[str], world: World) -> Iterable[Fault]:
        """What is wrong with the values taken together; `given` names the flags the user set."""
        ...

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Any:
        """The same arguments with every default that depends on others filled in."""
        ...


A = TypeVar("A", bound=Arguments)


@dataclass
class _Reading:
    """Values and faults collected while reading."""

    values: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)


def parse_arguments(cls: type[A], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> A:
    """The arguments of a command, checked and resolved.

    Args:
        cls: `RlhfArguments` or `RolloutArguments`.
        argv: the words after the command's name.
        environ: the process environment (default: `os.environ`), for the world size and keys.

    Raises:
        UsageError: with every fault found, one line each.
    """
    environ = os.environ if environ is None else environ
    config, words = _split_config(argv)
    reading = _Reading()
    _read_words(cls, words, reading)
    if config is not None:
        _read_config(cls, config, reading)
    for spec in flag_specs(cls).values():
        if spec.info.required and spec.name not in reading.values and spec.name not in reading.faulty:
            reading.faults.append(f"--{spec.name} is missing: {spec.info.help}")
            reading.faulty.add(spec.name)
    world, world_faults = World.from_environment(environ)
    reading.faults += world_faults
    arguments = cls(**reading.values)
    given = frozenset(reading.values)
    for fault in arguments.faults(given, world):
        if not reading.faulty.intersection(fault.flags):
            reading.faults.append(fault.text)
    if reading.faults:
        raise UsageError(*reading.faults)
    return arguments.resolved(given, world, environ)


def is_flag(word: str) -> bool:
    """Whether a word of the command line is a flag (`-1` and `-0.5` are values)."""
    return _FLAG.match(word) is not None


def _split_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    if argv and not is_flag(argv[0]) and argv[0].lower().endswith(CONFIG_SUFFIXES):
        return argv[0], argv[1:]
    return None, argv


def _read_words(cls: type, words: Sequence[str], reading: _Reading) -> None:
    known = spellings(cls)
    seen: dict[str, str] = {}
    for written, values in _flags_with_values(words, reading.faults):
        spelling = written.lstrip("-").replace("-", "_")
        spec = known.get(spelling) if written.startswith("--") else None
        if spec is None:
            reading.faults.append(unknown_flag(cls, written))
            continue
        if spec.name in seen:
            also = "" if seen[spec.name] == spelling else f", once as --{seen[spec.name]}"
            reading.faults.append(f"--{spelling} is given twice{also}: keep one")
            continue
        seen[spec.name] = spelling
        try:
            reading.values[spec.name] = from_words(spec, values)
        except ValueError as error:
            reading.faults.append(f"--{spelling} {error}")
            reading.faulty.add(spec.name)


def _flags_with_values(words: Sequence[str], faults: list[str]) -> list[tuple[str, list[str]]]:
    """Each flag as written and the words that belong to it; words before the first flag are faults."""
    result: list[tuple[str, list[str]]] = []
    for word in words:
        if is_flag(word):
            name, equals, value = word.partition("=")
            result.append((name, [value] if equals else []))
        elif result:
            result[-1][1].append(word)
        else:
            faults.append(f"{word!r} stands before any flag: only a config file ({', '.join(CONFIG_SUFFIXES)}) may")
    return result


def _read_config(cls: type, path: str, reading: _Reading) -> None:
    """Adds the entries of a config file that the command line does not set."""
    entries = _load_config(path, reading.faults)
    known = spellings(cls)
    seen: dict[str, str] = {}
    for key, value in entries.items():
        spelling = str(key).lstrip("-").replace("-", "_")
        spec = known.get(spelling)
        if spec is None:
            reading.faults.append(f"{path}: {unknown_flag(cls, spelling)}")
            continue
        if spec.name in seen:
            reading.faults.append(f"{path}: {spelling} is given twice, once as {seen[spec.name]}: keep one")
            continue
        seen[spec.name] = spelling
        if spec.name in reading.values or spec.name in reading.faulty:
            continue
        try:
            reading.values[spec.name] = from_config(spec, value)
        except ValueError as error:
            reading.faults.append(f"{path}: {spelling} {error}")
            reading.faulty.add(spec.name)


def _load_config(path: str, faults: list[str]) -> dict[Any, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        faults.append(f"config file {path}: {error.strerror or error}")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        faults.append(f"config file {path}{place}: not valid YAML ({getattr(error, 'problem', None) or error})")
        return {}
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        faults.append(f"config file {path}: wants lines like `learning_rate: 1e-6`")
        return {}
    return loaded


def unknown_flag(cls: Any, written: str) -> str:
    """One line about a flag that is not ours: refused by name, ms-swift's, or a typo."""
    name = written.lstrip("-").replace("-", "_")
    shown = written if written.startswith("-") else f"--{name}"
    reason = refusal(name)
    if reason:
        return f"{shown}: {reason}"
    names = sorted(spellings(cls))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if name in MS_SWIFT_GRPO_FLAGS and name not in names:
        hint = f"; the nearest it has is --{near[0]}" if near else ""
        return (
            f"{shown} is an ms-swift flag that `swift {cls.command}` does not have in this version: leave it out{hint}"
        )
    if near:
        return f"unknown flag {shown}: did you mean --{near[0]}?"
    return f"unknown flag {shown}: `swift {cls.command} --help` lists the flags"


def to_dict(arguments: Any) -> dict[str, Any]:
    """All flags as JSON-able values; secrets are left out (they travel in the environment)."""
    specs = flag_specs(type(arguments))
    values = dataclasses.asdict(arguments)
    return {name: None if specs[name].info.secret else value for name, value in values.items()}
