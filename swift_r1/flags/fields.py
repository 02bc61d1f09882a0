"""What one flag is: a dataclass field with its help, limits, aliases, choices and scope as metadata; and how text and
YAML become its value."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift_r1.wire.urls import keys_in, why_no_url, without_password

_KEY = "swift_r1.flag"
_TRUE = {"true", "yes", "1", "on"}
_FALSE = {"false", "no", "0", "off"}
_WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "a JSON object",
    str: "text",
}


@dataclass(frozen=True, eq=False, slots=True)
class Scope:
    """Says where a flag is read. Given elsewhere it is refused: a flag that does nothing misleads.

    Attributes:
        applies: whether these arguments read the flag.
        else_message: ends the message "--flag has no effect ..."; `{name}` stands for the value of another flag.
        allow_default: a flag that is given as its default None, false, 0 or empty is no fault.
        warn_only: given elsewhere it is no fault; a line at the start of the run says that it has no effect.
    """

    applies: Callable[[Any], bool]
    else_message: str
    allow_default: bool = False
    warn_only: bool = False


@dataclass(frozen=True, slots=True)
class FlagInfo:
    """The metadata of one flag.

    Attributes:
        help: one line for `--help`.
        choices: the allowed values (empty: any).
        aliases: other spellings of the flag.
        required: must be given on the command line or in the config file.
        unless: the flags that make a required one optional.
        at_least, more_than, at_most, less_than: limits of a number, each checked on list items too.
        scopes: where it is read; all of them must hold.
        gpu_only: has an effect only on a GPU.
        may_change: a resumed run may have another value, since it does not change what is learned.
        ms_swift: ms-swift's default where it differs from ours, as text for the help.
        instead_of: flags that say the same in another way; only one of them may be given.
        check: raises ValueError or UsageError for a value (of a list, for an item) that cannot be.
        secret: the variable in which its value goes to other processes; it is never written to a file or shown.
        synonyms: ms-swift's words for some of the choices.
        elsewhere: ms-swift's words for what other flags do here, or nothing does, and what is said of each.
        objects: the value, or items of the list, may be JSON objects; in a config file they are written as such.
        positional: a list whose items may stand without the flag's name, before the other flags or after them.
    """

    help: str
    choices: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    required: bool = False
    unless: tuple[str, ...] = ()
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    scopes: tuple[Scope, ...] = ()
    gpu_only: bool = False
    may_change: bool = False
    ms_swift: str | None = None
    instead_of: tuple[str, ...] = ()
    check: Callable[[Any], object] | None = None
    secret: str | None = None
    objects: bool = False
    positional: bool = False
    synonyms: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag of one command. `kind` is `bool`, `int`, `float`, `str` or `dict`; with `is_list`, a list of those."""

    name: str
    kind: type
    is_list: bool
    default: Any
    group: str
    info: FlagInfo


def flag(default: Any, help: str, *scopes: Scope, **info: Any) -> Any:
    """Makes a dataclass field that is a command-line flag; `info` are the other fields of `FlagInfo`."""
    others = " and ".join(f"--{name}" for name in info.get("instead_of", ()))
    about = FlagInfo(
        help=help + (f"; instead of {others}" if others else ""), scopes=scopes, **info
    )
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={_KEY: about})
    return dataclasses.field(default=default, metadata={_KEY: about}, repr=about.secret is None)


def resumable_flag(default: Any, help: str, *scopes: Scope, **info: Any) -> Any:
    """Makes a flag that a resumed run may have otherwise (`FlagInfo.may_change`)."""
    return flag(default, help, *scopes, may_change=True, **info)


RATE: Mapping[str, Any] = {"at_least": 0, "at_most": 1}
"""Bounds of all learning rates: `2e5` is a slip for `2e-5`, and no optimizer here takes a larger one than 1."""
_specs: dict[type, Mapping[str, FlagSpec]] = {}


def flag_specs(cls: type[Any]) -> Mapping[str, FlagSpec]:
    """Returns the flags of a command's argument class by name, in the order of its groups."""
    if cls not in _specs:
        hints = typing.get_type_hints(cls)
        groups = _groups(cls)
        defaults = cls()
        _specs[cls] = {
            item.name: FlagSpec(
                item.name,
                *_kind(hints[item.name]),
                getattr(defaults, item.name),
                groups[item.name],
                item.metadata[_KEY],
            )
            for item in dataclasses.fields(cls)
            if _KEY in item.metadata
        }
    return _specs[cls]


def spellings(cls: type[Any]) -> Mapping[str, FlagSpec]:
    """Returns every accepted spelling (names and aliases, without dashes) of a command's flags."""
    specs = flag_specs(cls)
    return {name: spec for spec in specs.values() for name in (spec.name, *spec.info.aliases)}


def no_effect(names: Sequence[str], where: str) -> str:
    """Returns the message about flags that nothing reads."""
    return f"{', '.join(f'--{name}' for name in names)} {'has' if len(names) == 1 else 'have'} no effect {where}"


def scope_faults(args: Any, given: frozenset[str]) -> Iterator[str]:
    """Yields the flags that were given outside their scope, or beside one that they stand for."""
    yield from doubled_flags(args, given)
    yield from unread_flags(args, given, warn_only=False)


def doubled_flags(args: Any, given: frozenset[str]) -> Iterator[str]:
    """Yields the flags that were given beside one that they stand for."""
    for name, spec in flag_specs(type(args)).items():
        stands = name in given and getattr(args, name) != spec.default
        for other in given.intersection(spec.info.instead_of) if stands else ():
            yield f"give either --{name} or --{other}, not both"


def unread_flags(args: Any, given: frozenset[str], *, warn_only: bool) -> Iterator[str]:
    """Yields a line about the flags that were given outside each scope that is `warn_only`, or is not; of several tasks
    one that reads a flag is enough."""
    views = getattr(args, "views", [args])
    unused: dict[Scope, list[str]] = {}
    for name, spec in flag_specs(type(args)).items():
        off = not getattr(args, name) and getattr(args, name) == spec.default
        for scope in spec.info.scopes if name in given else ():
            if (
                scope.warn_only == warn_only
                and not (scope.allow_default and off)
                and not any(map(scope.applies, views))
            ):
                unused.setdefault(scope, []).append(name)
    for scope, names in unused.items():
        yield no_effect(names, scope.else_message.format_map(vars(args)))


def check_url(url: str) -> None:
    why = why_no_url(url)
    if why is not None:
        raise ValueError(f"{why}: {without_password(url)!r}")


def check_no_key(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a key among the named values of a flag, whose text is written to `args.json`."""
    name = next(keys_in(values), None)
    if name:
        raise ValueError(
            f"holds {name!r}: a key has no place in a flag, which is written to files: put it into a variable, "
            "and where an environment or a reward needs it, name that in --reward_env"
        )


def check_pattern(text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text}: no pattern ({error})") from error


def check_stop_word(word: str) -> None:
    if not word:
        raise ValueError("holds an empty string, which would end every completion at once")


def _groups(cls: type) -> dict[str, str]:
    """Returns each field's group: the first docstring line of the class that declares it."""
    groups: dict[str, str] = {}
    for base in cls.__mro__:
        for name in inspect.get_annotations(base):
            groups.setdefault(name, (base.__doc__ or base.__name__).splitlines()[0].rstrip("."))
    return groups


def _kind(hint: Any) -> tuple[type, bool]:
    """Returns the type of a flag's values, and whether it takes a list of them."""
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not type(None))
    origin = typing.get_origin(hint)
    if origin is list:
        return typing.get_args(hint)[0], True
    return origin or hint, False


def takes_word(spec: FlagSpec | None, words: Sequence[str], word: str) -> bool:
    """Says whether a flag that has `words` takes one more, in a command with a positional flag."""
    if spec is None or spec.is_list:
        return True
    return not words and (spec.kind is not bool or word.lower() in _TRUE | _FALSE)


def from_words(spec: FlagSpec, words: Sequence[str]) -> Any:
    """Returns the value of the words that follow a flag on the command line; ValueError where they are too many or too
    few, of another type, out of range or not among the choices."""
    if spec.kind is bool and not words:
        return True
    if not words:
        raise ValueError("needs a value")
    if spec.is_list:
        return [_item(spec, word) for word in words]
    if len(words) > 1:
        more = "***" if spec.info.secret else " ".join(words[1:])
        raise ValueError(
            f"takes one value but got {len(words)} (what is {more!r}? quote a value that holds spaces)"
        )
    return _item(spec, words[0])


def from_config(spec: FlagSpec, value: Any) -> Any:
    """Returns the value of a config file's entry (already a YAML type). Raises `ValueError` like `from_words`."""
    if value is None:
        return spec.default
    if spec.is_list:
        if isinstance(value, str) and spec.kind is not str and len(value.split()) > 1:
            raise ValueError(f"is a list, in YAML [{', '.join(value.split())}]")
        items = value if isinstance(value, list) else [value]
        if spec.info.objects:
            items = [
                json.dumps(item, ensure_ascii=False) if isinstance(item, dict) else item
                for item in items
            ]
        return [_item(spec, _as_word(spec, item)) for item in items]
    if spec.kind is dict and isinstance(value, dict):
        if spec.info.check is not None:
            spec.info.check(value)
        return value
    if spec.info.objects and isinstance(value, dict):
        return json.dumps(value)
    return _item(spec, _as_word(spec, value))


def as_words(values: Mapping[str, Any]) -> list[str]:
    """Returns the command line that gives flags these values; None and {} leave a flag out."""
    words: list[str] = []
    for name, value in values.items():
        if value not in (None, {}):
            items = value if isinstance(value, list) else [value]
            words += [
                f"--{name}",
                *(
                    json.dumps(item) if isinstance(item, bool | dict) else str(item)
                    for item in items
                ),
            ]
    return words


def shown_value(value: Any) -> str:
    """Returns a value as it is written after its flag."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _as_word(spec: FlagSpec, value: Any) -> str:
    if isinstance(value, bool) and str(value).lower() in spec.info.synonyms:
        return str(value).lower()
    if isinstance(value, bool) and spec.kind is not bool:
        raise ValueError(f"must be {_WANTED[spec.kind]}, not a bool: put the value in quotes")
    if isinstance(value, dict | list):
        raise ValueError(f"must be {_WANTED[spec.kind]}, not {json.dumps(value)}")
    return str(value)


def _item(spec: FlagSpec, word: str) -> Any:
    value = _typed(spec.kind, word)
    _check_limits(spec, value)
    info = spec.info
    value = info.synonyms.get(str(value).lower(), value) if info.synonyms else value
    if info.elsewhere and value in info.elsewhere:
        raise ValueError(f"{value} {info.elsewhere[value]}")
    if info.choices and value not in info.choices:
        raise ValueError(f"must be one of {', '.join(map(str, info.choices))}, not {value!r}")
    if info.check is not None:
        info.check(value)
    return value


def _typed(kind: type, word: str) -> Any:
    try:
        word.encode()
    except UnicodeEncodeError:
        # bytes of another encoding on the command line, half a character in a file
        raise ValueError("is not valid UTF-8") from None
    if kind is bool:
        lowered = word.strip().lower()
        if lowered not in _TRUE | _FALSE:
            raise ValueError(f"must be true or false, not {word!r}")
        return lowered in _TRUE
    if kind is dict:
        return _json_object(word)
    if kind not in (int, float):
        return word
    try:
        number = kind(word)
    except ValueError:
        raise ValueError(f"must be {_WANTED[kind]}, not {word!r}") from None
    if kind is float and not math.isfinite(number):
        raise ValueError(f"must be a finite number, not {word!r}")
    return number


def _json_object(word: str) -> dict[str, Any]:
    try:
        value = json.loads(word)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"must be a JSON object, and {word!r} is not JSON ({error.msg} at {error.pos})"
        ) from None
    except RecursionError:
        raise ValueError("must be a JSON object, and is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object like '{{\"a\": 1}}', not {word!r}")
    return value


def _check_limits(spec: FlagSpec, value: Any) -> None:
    limits = {
        "at_least": operator.ge,
        "more_than": operator.gt,
        "at_most": operator.le,
        "less_than": operator.lt,
    }
    for name, holds in limits.items():
        limit = getattr(spec.info, name)
        if limit is not None and not holds(value, limit):
            raise ValueError(f"must be {name.replace('_', ' ')} {limit:g}, not {value}")
