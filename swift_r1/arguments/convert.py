"""Text and YAML values to a flag's typed value; a bad one raises `ValueError` with a readable cause."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from swift_r1.arguments.fields import FlagSpec

_TRUE = {"true", "yes", "1", "on"}
_FALSE = {"false", "no", "0", "off"}
_WANTED = {bool: "true or false", int: "a whole number", float: "a number", dict: "a JSON object", str: "text"}


def from_words(spec: FlagSpec, words: Sequence[str]) -> Any:
    """The value of the words that follow a flag on the command line.

    Raises:
        ValueError: wrong number of words, wrong type, a value out of range or not among the choices.
    """
    if spec.kind is bool and not words:
        return True
    if not words:
        raise ValueError("needs a value")
    if spec.is_list:
        return [_item(spec, word) for word in words]
    if len(words) > 1:
        extra = " ".join(words[1:])
        raise ValueError(f"takes one value but got {len(words)} (what is {extra!r}? quote a value that holds spaces)")
    return _item(spec, words[0])


def from_config(spec: FlagSpec, value: Any) -> Any:
    """The value of a config file's entry (already a YAML type). Raises `ValueError` like `from_words`."""
    if value is None:
        return spec.default
    if spec.is_list:
        items = value if isinstance(value, list) else [value]
        if spec.info.objects:
            items = [json.dumps(item, ensure_ascii=False) if isinstance(item, dict) else item for item in items]
        return [_item(spec, _as_word(spec, item)) for item in items]
    if spec.kind is dict and isinstance(value, dict):
        return value
    if spec.name == "deepspeed" and isinstance(value, dict):
        return json.dumps(value)
    return _item(spec, _as_word(spec, value))


def _as_word(spec: FlagSpec, value: Any) -> str:
    if isinstance(value, bool) and str(value).lower() in spec.info.synonyms:
        return str(value).lower()
    if isinstance(value, bool) and spec.kind is not bool:
        raise ValueError(f"wants {_WANTED[spec.kind]}, not a bool: put the value in quotes")
    if isinstance(value, dict | list):
        raise ValueError(f"wants {_WANTED[spec.kind]}, not {json.dumps(value)}")
    return str(value)


def _item(spec: FlagSpec, word: str) -> Any:
    value = _typed(spec.kind, word)
    _check_limits(spec, value)
    info = spec.info
    value = info.synonyms.get(str(value).lower(), value) if info.synonyms else value
    if info.elsewhere and value in info.elsewhere:
        raise ValueError(f"{value} is written {info.elsewhere[value]} here")
    if info.choices and value not in info.choices:
        raise ValueError(f"must be one of {', '.join(info.choices)}, not {value!r}")
    return value


def _typed(kind: type, word: str) -> Any:
    try:
        word.encode()
    except UnicodeEncodeError:  # bytes of another encoding on the command line, half a character in a file
        raise ValueError("holds what is no UTF-8 text") from None
    if kind is bool:
        lowered = word.strip().lower()
        if lowered not in _TRUE | _FALSE:
            raise ValueError(f"wants true or false, not {word!r}")
        return lowered in _TRUE
    if kind is dict:
        return _json_object(word)
    if kind not in (int, float):
        return word
    try:
        number = kind(word)
    except ValueError:
        raise ValueError(f"wants {_WANTED[kind]}, not {word!r}") from None
    if kind is float and not math.isfinite(number):
        raise ValueError(f"wants a finite number, not {word!r}")
    return number


def _json_object(word: str) -> dict[str, Any]:
    try:
        value = json.loads(word)
    except json.JSONDecodeError as error:
        raise ValueError(f"wants a JSON object, and {word!r} is not JSON ({error.msg} at {error.pos})") from None
    if not isinstance(value, dict):
        raise ValueError(f"wants a JSON object like '{{\"a\": 1}}', not {word!r}")
    return value


def _check_limits(spec: FlagSpec, value: Any) -> None:
    info = spec.info
    if info.at_least is not None and value < info.at_least:
        raise ValueError(f"must be at least {info.at_least:g}, not {value}")
    if info.more_than is not None and value <= info.more_than:
        raise ValueError(f"must be more than {info.more_than:g}, not {value}")
    if info.at_most is not None and value > info.at_most:
        raise ValueError(f"must be at most {info.at_most:g}, not {value}")
    if info.less_than is not None and value >= info.less_than:
        raise ValueError(f"must be less than {info.less_than:g}, not {value}")
