"""The images of prompts on the server: each is sent once, and named by its hash from then on."""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from swift_r1.data.images import decoded
from swift_r1.errors import one_line
from swift_r1.serving.engines.base import PromptImage
from swift_r1.wire.protocol import HTTPError, ImagesMissing, StoredImage

MAX_IMAGE_BYTES = 32 << 20
MAX_IMAGE_PIXELS = 1 << 26
_KEPT_BYTES = 2 << 30
_FORMATS = ("JPEG", "PNG", "WEBP")  # no format whose reader starts a program


@dataclass(slots=True)
class _Kept:
    data: bytes
    users: int = 0


class ImageStore:
    """Files of images by their SHA-256. Beyond `max_bytes` those that were named longest ago are forgotten, except what
    running requests use. One event loop only."""

    def __init__(self, max_bytes: int = _KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, data: bytes) -> str:
        """Keeps a file that `checked` has seen; returns its name."""
        name = hashlib.sha256(data).hexdigest()
        if name not in self._kept:
            self._kept[name] = _Kept(data)
            self.bytes += len(data)
        self._kept.move_to_end(name)
        self._forget_old(name)
        return name

    @contextmanager
    def using(self, names: Sequence[str]) -> Iterator[None]:
        """Keeps these for as long as the body runs. Raises ImagesMissing."""
        missing = [name for name in dict.fromkeys(names) if name not in self._kept]
        if missing:
            raise ImagesMissing(missing)
        used = [self._kept[name] for name in names]
        for name, one in zip(names, used, strict=True):
            self._kept.move_to_end(name)
            one.users += 1
        try:
            yield
        finally:
            for one in used:
                one.users -= 1

    def of(self, names: Sequence[str]) -> tuple[PromptImage, ...]:
        """Returns these images. Raises ImagesMissing."""
        with self.using(names):
            return tuple(PromptImage(name, self._kept[name].data) for name in names)

    def _forget_old(self, newest: str) -> None:
        for name, one in list(self._kept.items()):
            if self.bytes <= self._max_bytes:
                return
            if not one.users and name != newest:
                del self._kept[name]
                self.bytes -= len(one.data)


def check_size(size: int) -> None:
    """Raises HTTPError (413) for a file that is too large."""
    if size > MAX_IMAGE_BYTES:
        raise HTTPError(413, f"an image of {size} bytes: at most {MAX_IMAGE_BYTES} are taken")


def checked(data: bytes, name: str | None = None) -> StoredImage:
    """Decodes an image to see that an engine will be able to, which takes a while. Raises HTTPError: 413 where it is too
    large, 400 where it is no image, or its SHA-256 is not `name`."""
    from PIL import Image

    check_size(len(data))
    if name is not None and hashlib.sha256(data).hexdigest() != name:
        raise HTTPError(400, f"the bytes are not those of image {name}: their SHA-256 is another")
    try:
        width, height = Image.open(io.BytesIO(data), formats=_FORMATS).size
        if width * height > MAX_IMAGE_PIXELS:
            raise HTTPError(
                413, f"an image of {width} x {height} pixels: at most {MAX_IMAGE_PIXELS} are taken"
            )
        decoded(data)
    except Image.DecompressionBombError as error:
        raise HTTPError(413, f"an image is too large: {one_line(error)}") from error
    # SyntaxError: Pillow's word for a broken PNG
    except (OSError, ValueError, SyntaxError) as error:
        raise HTTPError(400, f"an image cannot be read: {one_line(error)}") from error
    return StoredImage(width=width, height=height)
