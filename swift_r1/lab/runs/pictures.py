"""Small pictures of the images that a run's completions name, for its pages and reports.

A record may come from anybody, and name any file: what is shown is decoded and drawn anew, and only of a file whose bytes
have the hash that the record gives. So nobody learns what is in a file from a record of somebody who did not know it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from swift_r1.data.image_files import MOST_BYTES, plain
from swift_r1.data.images import COLUMN, ImageFile, decoded
from swift_r1.data.preprocessors import RowFault
from swift_r1.runtime.files import read_bytes

_SIDE = 320  # pixels, of which a picture has no more
_MOST = 16  # pictures of a prompt
_KEPT = 256  # pictures that are wanted again


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a prompt.

    Example: `Picture("1.png, 640 x 480 pixels", "data:image/jpeg;base64,...")`
    """

    title: str
    url: str | None  # None: the file is not there, or not what the run was given


def pictures_of(row: Mapping[str, Any]) -> list[Picture]:
    """Returns the images of the prompt of a line of `completions.jsonl`, in order."""
    named = row.get(COLUMN)
    found = [_named(one) for one in named[:_MOST]] if isinstance(named, list) else []
    return [_picture(one) for one in found if one is not None]


def _named(value: Any) -> ImageFile | None:
    """Returns what a line names; None where it is no image, as in a line that a run did not write."""
    kinds = {"path": str, "sha256": str, "width": int, "height": int}
    if not isinstance(value, dict) or not all(
        isinstance(value.get(name), kind) for name, kind in kinds.items()
    ):
        return None
    return ImageFile.of(value)


@lru_cache(_KEPT)
def _picture(image: ImageFile) -> Picture:
    title = f"{os.path.basename(image.path)}, {image.width} x {image.height} pixels"
    content = _content(image)
    if content is None:
        return Picture(f"{title}: the file is gone, or has changed since", None)
    try:
        drawn = _drawn(content)
    except RowFault:
        return Picture(f"{title}: it cannot be decoded", None)
    return Picture(title, f"data:image/jpeg;base64,{base64.b64encode(drawn).decode()}")


def _content(image: ImageFile) -> bytes | None:
    """Returns the file's bytes; None where they do not have the hash."""
    try:
        content = read_bytes(image.path, MOST_BYTES)
    except (OSError, ValueError):
        return None
    return content if hashlib.sha256(content).hexdigest() == image.sha256 else None


def _drawn(content: bytes) -> bytes:
    """Returns the picture as a JPEG of at most `_SIDE` pixels in width and height. Raises RowFault."""
    image = decoded(plain(content).data)
    shrunk = max(1.0, max(image.size) / _SIDE)
    width, height = (math.ceil(side / shrunk) for side in image.size)
    file = io.BytesIO()
    image.resize((width, height)).save(file, "JPEG", quality=85)
    return file.getvalue()
