"""Finds which images a row has, and where they stand: in ms-swift's column and tags, or in OpenAI's parts of messages.
Rows keep both as the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_r1.data.image_files import ImageRules, kept
from swift_r1.data.images import COLUMN, TAG
from swift_r1.data.preprocessors import Row, RowFault

_NAMES = (COLUMN, "image")
_KINDS = ("image", "image_url", "input_image")
"""Types of parts that are images, in OpenAI's APIs and those of `transformers`."""


def take_images(row: Row) -> list[Any]:
    """Takes what a row gives for its images, in their order, out of its columns and its messages, whose parts become
    text with tags. Raises RowFault: both have some, or messages have places for images, and there are none."""
    columns = {name: row[name] for name in _NAMES if not is_empty(row.get(name))}
    for name in columns:
        del row[name]
    of_column = _as_list(next(iter(columns.values()))) if columns else []
    parts: list[Any] = []
    messages = row.get("messages")
    if isinstance(messages, list | tuple):
        row["messages"] = [_in_text(message, parts) for message in messages]
    in_parts = [one for one in parts if one is not None]
    if of_column and in_parts:
        raise RowFault("it has images in a column and others in its messages")
    if parts and not of_column and not in_parts:
        raise RowFault("its messages have places for images, and it has none")
    return of_column or in_parts


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def is_empty(value: Any) -> bool:
    """Returns whether a column of a row holds nothing."""
    return (
        value is None
        or (isinstance(value, str) and value in ("", "[]"))
        or (hasattr(value, "__len__") and not len(value))
    )


def _in_text(message: Any, found: list[Any]) -> Any:
    """Returns a message with tags for the parts that are images; `found` gets what each holds, None for nothing."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list | tuple) or not all(isinstance(one, Mapping) for one in parts):
        return message
    if not any(one.get("type") in _KINDS for one in parts):
        return message
    own = []
    for part in parts:
        if part.get("type") not in _KINDS:
            own.append(part)
            continue
        own.append({"type": "text", "text": TAG})
        held = (part.get(name) for name in (*_KINDS, "url", "path", "base64", "bytes"))
        found.append(next((one for one in held if not is_empty(one)), None))
    return {**message, "content": own}


def place_images(
    messages: Sequence[Row], given: Sequence[Any], rules: ImageRules, folders: Sequence[Path]
) -> tuple[list[Row], list[Row]]:
    """Returns the messages of a prompt and its images as the column keeps them. Where no tag is in the text, as many
    as there are images come before the first message that is not the system's, as in ms-swift.

    Raises:
        RowFault: there are more images than tags, or fewer; or one cannot be trained on.
    """
    tags = sum(message["content"].count(TAG) for message in messages)
    own = list(messages)
    if not tags:
        place = next(place for place, one in enumerate(own) if one["role"] != "system")
        own[place] = {**own[place], "content": TAG * len(given) + own[place]["content"]}
    elif tags != len(given):
        raise RowFault(f"its messages have {tags} {TAG} tags for {len(given)} images")
    files = []
    for number, one in enumerate(given, start=1):
        try:
            files.append(kept(one, rules, folders).stored())
        except RowFault as error:
            raise RowFault(f"image {number} of {len(given)}: {error}") from error
    return own, files
