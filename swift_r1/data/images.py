"""Images of rows: a file each, named by a hash of its bytes; nothing holds them decoded for a whole dataset.

What a preprocessor gives (a path, bytes, base64, a data URL, PIL) becomes, once, a file that every reader shows alike: RGB,
upright, one frame, within `--min_pixels` and `--max_pixels`, as JPEG, PNG or WebP. From there on an image is its bytes.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.errors import RunFailed

if TYPE_CHECKING:
    from PIL.Image import Image

TAG = "<image>"
"""Where an image stands in the text of a message of a row that has images."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image of a prompt, as rows keep it in their column `images`.

    Example: `ImageFile("/data/cats/1.png", "9f86d0...", 640, 480)`
    """

    path: str
    sha256: str  # of the file's bytes, which are what goes to engines
    width: int  # pixels
    height: int

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> ImageFile:
        return cls(stored["path"], stored["sha256"], stored["width"], stored["height"])

    def stored(self) -> dict[str, Any]:
        """Returns the form in which rows keep it."""
        return asdict(self)

    def read(self) -> bytes:
        """Returns the file's bytes. Raises RunFailed: it is gone, or is not what it was."""
        try:
            data = Path(self.path).read_bytes()
        except OSError as error:
            raise RunFailed(f"the image {self.path} of a row cannot be read: {error}") from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise RunFailed(f"the image {self.path} of a row has changed since the rows were read")
        return data


def decoded(data: bytes) -> Image:
    """Returns the picture of a file that `ImageFile` names, in RGB."""
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")
