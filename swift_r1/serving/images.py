"""The images of prompts on the server: each is sent once, and named by its hash from then on."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from swift_r1.data.image_files import PlainImage, plain
from swift_r1.data.preprocessors import RowFault
from swift_r1.serving.engines.base import PromptImage
from swift_r1.wire.protocol import HTTPError, ImagesMissing, StoredImage

_KEPT_BYTES = 2 << 30


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


def checked(data: bytes, name: str) -> StoredImage:
    """Decodes an image to see that an engine will be able to, which takes a while. Raises HTTPError (400) where it is
    none that trainers send, or its SHA-256 is not `name`."""
    if hashlib.sha256(data).hexdigest() != name:
        raise HTTPError(400, f"the bytes are not those of image {name}: their SHA-256 is another")
    made = plain_image(data)
    if made.data is not data:
        raise HTTPError(
            400,
            "the image is not what all read alike: RGB, upright, one frame, in JPEG, PNG or WebP",
        )
    return StoredImage(width=made.width, height=made.height)


def plain_image(data: bytes) -> PlainImage:
    """Returns an image as rows keep it. Raises HTTPError (400) as rows are left out."""
    try:
        return plain(data)
    except RowFault as error:
        raise HTTPError(400, f"of an image: {error}") from error
