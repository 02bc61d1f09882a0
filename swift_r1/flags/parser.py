"""Command line and config file to one argument object, with all faults reported together.

Syntax: `--flag value`, `--flag=value`, `--list a b`, dashes or underscores, `--switch` alone for true,
and one config file (YAML or JSON) first; flags win over it. Of a flag given twice the last one counts, with a warning.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from swift_r1.errors import UsageError, read_yaml, yaml_fault
from swift_r1.flags.fields import (
    FlagSpec,
    flag_specs,
    from_config,
    from_words,
    scope_faults,
    spellings,
    takes_word,
    unread_flags,
)
from swift_r1.flags.ms_swift_flags import Meaning, meanings
from swift_r1.flags.world import ProcessArguments, World

_logger = logging.getLogger("swift_r1.flags")
_FLAG = re.compile(r"--?[A-Za-z][\w-]*(=.*)?$", re.DOTALL)
_NAMED_FLAG = re.compile(r"--(\w+)")
API_KEY_VARIABLE = "SWIFT_API_KEY"
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, kw_only=True)
class Command:
    """The arguments of a command: a dataclass of flags that all have defaults."""

    command: ClassVar[str]
    of_others: ClassVar[str] = "leave it out"
    """What to do with a flag of another command."""
    always_so: tuple[str, ...] = ()
    """Flags of ms-swift that were given, as written, with the value that is always so here."""
    unread: tuple[str, ...] = ()
    """Lines about flags that were given and have no effect in this run."""

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        """Yields what is wrong with the values taken together; `given` names the flags the user set."""
        yield from scope_faults(self, given)

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        """Returns the same arguments with every default that depends on others filled in."""
        return self.with_secrets(environ)

    @property
    def about_flags(self) -> Iterator[str]:
        """Lines for the start of the run about flags that change nothing."""
        if self.always_so:
            yield f"always so here: {', '.join(self.always_so)}"
        yield from self.unread

    def with_secrets(self, environ: Mapping[str, str]) -> Self:
        """Returns the same arguments with the environment's secrets, where they are needed and not given."""
        values: dict[str, Any] = {}
        for name, spec in flag_specs(type(self)).items():
            if spec.info.secret:
                values[name] = getattr(self, name) or environ.get(spec.info.secret) or None
        return replace(self, **values)

    @property
    def secrets(self) -> dict[str, str]:
        """The values of its secrets by the variables in which they go to other processes."""
        values = {
            spec.info.secret: getattr(self, name) for name, spec in flag_specs(type(self)).items()
        }
        return {variable: value for variable, value in values.items() if variable and value}

    def to_dict(self) -> dict[str, Any]:
        """Returns all flags as JSON-able values, without secrets, which travel in the environment."""
        values = asdict(self)
        return {
            name: None if spec.info.secret else values[name]
            for name, spec in flag_specs(type(self)).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Returns the arguments that `to_dict` wrote, and the secrets of the environment; TypeError for a key that is
        no flag (the file is of another version)."""
        unknown = sorted(set(values) - set(flag_specs(cls)))
        if unknown:
            raise TypeError(f"not flags of swift {cls.command}: {', '.join(unknown)}")
        return cls(**values).with_secrets(os.environ)


A = TypeVar("A", bound=Command)


@dataclass
class _Reading:
    """Values and faults collected while reading. `faulty` are the flags that have a fault; `always_so` those of
    ms-swift that were given with the value they always have here."""

    cls: type[Command]
    values: dict[str, Any] = field(default_factory=dict)
    always_so: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)

    def convert(
        self, spec: FlagSpec, value: Any, convert: Callable[[FlagSpec, Any], Any], name: str
    ) -> None:
        """Keeps the value of a flag, or the fault under the flag's `name` as the user wrote it."""
        try:
            self.values[spec.name] = convert(spec, value)
        except (ValueError, UsageError) as error:
            self.faults += error.faults if isinstance(error, UsageError) else [f"{name} {error}"]
            self.faulty.add(spec.name)

    def check(self, meaning: Meaning, value: Any, name: str) -> None:
        """Notes the value of a flag that has no field as always so here, or its fault. None leaves it out."""
        if value is None:
            return
        words = (
            value
            if isinstance(value, list)
            else [value if isinstance(value, str) else json.dumps(value)]
        )
        if meaning.accepts(words):
            self.always_so.append(" ".join((name, *words)))
        else:
            self.faults.append(meaning.fault(name, words))


def without_flag(words: Sequence[str], name: str) -> list[str]:
    """Returns a command line without a flag and its values."""
    kept: list[str] = []
    dropped = False
    for word in words:
        if is_flag(word):
            dropped = spelling(word.partition("=")[0]) == name
        if not dropped:
            kept.append(word)
    return kept


def given_value(words: Sequence[str], name: str) -> str | None:
    """Returns what a command line says of a flag, or the config file before it. None where neither does, or the file
    cannot be read, which parsing it says."""
    for index, word in enumerate(words):
        written, equals, value = word.partition("=")
        if is_flag(word) and spelling(written) == name:
            return value if equals else next(iter(words[index + 1 :]), None)
    if words and words[0].lower().endswith(CONFIG_SUFFIXES):
        entries = _load_config(words[0], []) or {}
        found = {spelling(str(key)): value for key, value in entries.items()}.get(name)
        return found if isinstance(found, str) else None
    return None


def parse_arguments(
    cls: type[A],
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    from_server: Mapping[str, Any] | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> A:
    """Returns the arguments of a command from the words after its name, checked and resolved.

    `environ` (default: `os.environ`) has the world size and keys; `from_server` are values that count as given, which
    the rollout server has checked; `recorded` are what flags that are not given have in the place of their defaults.
    Raises UsageError with every fault found.
    """
    environ = os.environ if environ is None else environ
    recorded = recorded or {}
    reading = _Reading(cls)

    positional = any(spec.info.positional for spec in flag_specs(cls).values())
    may_have_config = bool(argv) and not is_flag(argv[0]) and not positional
    has_config = may_have_config and argv[0].lower().endswith(CONFIG_SUFFIXES)
    _read(flags_with_values(cls, argv[has_config:], reading.faults), from_words, reading)
    entries = _load_config(argv[0], reading.faults) if has_config else None

    if entries is not None:
        _read(((str(key), value) for key, value in entries.items()), from_config, reading, argv[0])
    elif may_have_config:  # what is missing may stand in the file that was meant
        raise UsageError(*reading.faults)

    known = {*reading.values, *reading.faulty, *recorded}
    for spec in flag_specs(cls).values():
        if spec.info.required and known.isdisjoint((spec.name, *spec.info.unless)):
            reading.faults.append(f"--{spec.name} is missing: {spec.info.help}")
            reading.faulty.add(spec.name)

    reading.values |= from_server or {}
    arguments = cls(**{**recorded, **reading.values}, always_so=tuple(reading.always_so))
    if isinstance(arguments, ProcessArguments):
        environ = {**environ, **arguments.process_variables}
    world, world_faults = World.from_environment(environ)
    reading.faults += world_faults

    given = frozenset(reading.values)
    # A fault that names a faulty flag may be its consequence.
    for text in arguments.faults(given, world):
        if not reading.faulty.intersection(_NAMED_FLAG.findall(text)):
            reading.faults.append(text)
    if reading.faults:
        raise UsageError(*reading.faults)

    arguments = replace(arguments, unread=tuple(unread_flags(arguments, given, warn_only=True)))
    return arguments.resolved(given, world, environ)


def is_flag(word: str) -> bool:
    """Says whether a word of the command line is a flag (`-1` and `-0.5` are values)."""
    return _FLAG.match(word) is not None


def _read(
    entries: Iterable[tuple[str, Any]],
    convert: Callable[[FlagSpec, Any], Any],
    reading: _Reading,
    path: str = "",
) -> None:
    """Adds flags with their values to a reading.

    Args:
        entries: what was written, and the words after it; or, with `path`, the content of that config file, of which
            what the command line sets does not count.
        convert: makes the value of a flag of such words, or of such an entry.
    """
    known = spellings(reading.cls)
    seen: dict[str, str] = {}
    on_command_line = reading.values.keys() | reading.faulty
    before = f"{path}: " if path else ""
    dashes = "" if path else "--"

    for written, value in entries:
        lookup = spelling(written)
        is_name = bool(path) or written.startswith("--")
        spec = known.get(lookup) if is_name else None
        meaning = meanings().get(lookup) if is_name and spec is None else None
        if spec is None and meaning is None:
            reading.faults.append(before + unknown_flag(reading.cls, lookup if path else written))
            continue

        name = lookup if spec is None else spec.name
        shown = f"{before}{dashes}{lookup}"
        if name in seen:
            also = "" if seen[name] == lookup else f", once as {dashes}{seen[name]}"
            reading.faults.append(f"{shown} is given twice{also}: keep one")
            continue
        seen[name] = lookup

        if meaning is not None:
            reading.check(meaning, value, shown)
        elif spec is not None and name not in on_command_line:
            reading.convert(spec, value, convert, shown)


def flags_with_values(
    cls: type[Command], words: Sequence[str], faults: list[str]
) -> list[tuple[str, list[str]]]:
    """Returns each flag as it was written last, and the words that belong to it. Other words are those of the
    positional flag; without one they belong to the flag before them, and those before the first flag are faults."""
    known = spellings(cls)
    positional = next((f"--{spec.name}" for spec in known.values() if spec.info.positional), None)
    result: list[tuple[str, list[str]]] = []
    alone: list[str] = []

    for word in words:
        if is_flag(word):
            name, equals, value = word.partition("=")
            result.append((name, [value] if equals else []))
        elif positional and not (
            result and takes_word(known.get(spelling(result[-1][0])), result[-1][1], word)
        ):
            alone.append(word)
        elif result:
            result[-1][1].append(word)
        else:
            faults.append(
                f"{word!r} stands before any flag: only a config file ({', '.join(CONFIG_SUFFIXES)}) may"
            )
    if positional and alone:
        result.insert(0, (positional, alone))

    last: dict[str, tuple[str, list[str]]] = {}
    for entry in result:
        key = entry[0].replace("-", "_")
        if key in last:
            _logger.warning("%s is given twice: the last one counts", entry[0])
        last[key] = entry
    return list(last.values())


def spelling(written: str) -> str:
    """Returns a flag as it is looked up: without dashes in front, and with underscores for the others."""
    return written.lstrip("-").replace("-", "_")


def _load_config(path: str, faults: list[str]) -> dict[Any, Any] | None:
    """Reads the config file; returns None where it cannot be read, which is a fault."""
    import yaml

    try:
        loaded = read_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        faults.append(f"config file {path}: {error.strerror or error}")
        return None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        faults.append(f"config file {path}: not valid YAML ({yaml_fault(error)})")
        return None
    if loaded is not None and not isinstance(loaded, dict):
        faults.append(f"config file {path}: must hold lines like `learning_rate: 1e-6`")
        return None
    return loaded or {}


def _commands(cls: type[Command]) -> Iterator[type[Command]]:
    """Yields the classes that are commands; others only share flags among some."""
    for other in cls.__subclasses__():
        if "command" in vars(other):
            yield other
        yield from _commands(other)


def unknown_flag(cls: type[Command], written: str) -> str:
    """Returns a line about a flag that is not ours and has no meaning here: another command's, or a typo."""
    name = spelling(written)
    shown = written if written.startswith("-") else f"--{name}"
    names = sorted(spellings(cls))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    owners = [other.command for other in _commands(Command) if name in spellings(other)]
    if owners and name not in names:
        return f"{shown} is a flag of `swift {owners[0]}`, not of `swift {cls.command}`: {cls.of_others}"
    if near:
        return f"unknown flag {shown}: did you mean --{near[0]}?"
    return f"unknown flag {shown}: `swift {cls.command} --help` lists the flags"
