"""Images of rows: a file each, named by a hash of its bytes; nothing holds them decoded for a whole dataset.

What a preprocessor gives (a path, bytes, base64, a data URL, PIL) becomes, once, a file that every reader shows alike: RGB,
upright, one frame, within `--min_pixels` and `--max_pixels`, as JPEG, PNG or WebP (`image_files.py`). From there on an
image is its bytes.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from swift_r1.errors import RunFailed
from swift_r1.runtime.files import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

TAG = "<image>"
"""Where an image stands in the text of a message of a row that has images."""
COLUMN = "images"


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
            data = read_bytes(self.path)
        except OSError as error:
            raise RunFailed(f"the image {self.path} of a row cannot be read: {error}") from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise RunFailed(f"the image {self.path} of a row has changed since the rows were read")
        return data


def images_of(row: Mapping[str, Any]) -> tuple[ImageFile, ...]:
    """Returns the images of a row of `rows.py`, in order."""
    kept = row.get(COLUMN)
    return tuple(map(ImageFile.of, kept)) if isinstance(kept, list) else ()


def placeless(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a row that is the same wherever its images are, for a hash of it."""
    images = [{**image.stored(), "path": ""} for image in images_of(row)]
    return {**row, COLUMN: images} if images else row


def rewards_column(images: Sequence[ImageFile]) -> dict[str, list[dict[str, Any]]]:
    """Returns the column `images` as rewards get it, in the form that ms-swift has of it, which is that of `datasets`;
    none without images."""
    return {COLUMN: [{"bytes": None, "path": image.path} for image in images]} if images else {}


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as chat templates want it, with a part for each tag in its text, as for each text between
    them."""
    before, *behind = message["content"].split(TAG)
    parts = [{"type": "text", "text": before}]
    for text in behind:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    own = [part for part in parts if part.get("text") != ""]
    return {**message, "content": own if behind else message["content"]}


def decoded(data: bytes) -> Image:
    """Returns the picture of a file that `ImageFile` names, in RGB."""
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")
