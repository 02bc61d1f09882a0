"""From what a row gives for an image to an `ImageFile`: the file itself where every reader shows it alike, else a PNG
made of it. Images that cannot be trained on are faults of their row."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import os
import struct
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.data.cache import keep_image
from swift_r1.data.images import ImageFile
from swift_r1.data.preprocessors import RowFault
from swift_r1.errors import UsageError, a_kind, one_line
from swift_r1.runtime.files import read_bytes
from swift_r1.wire.urls import is_loopback, without_password

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 89_478_485
"""Pixels of the largest image that is decoded: a quarter of a GiB in RGB, which Pillow takes for a bomb beyond it."""
MOST_BYTES = 64 << 20
_ENDINGS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
# no others: some call programs
_FORMATS = (*_ENDINGS, "GIF", "BMP", "TIFF")
_READ = "JPEG, PNG, WebP, GIF, BMP and TIFF are read"
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError)
_LONGEST_PATH = 2_000  # characters; what is longer is base64
_ORIENTATION = 0x0112  # of EXIF
_URL_S = 20.0  # for a whole image
_TRIES = 3


@dataclass(frozen=True, slots=True)
class ImageRules:
    """What is done to images of rows.

    Attributes:
        max_pixels: larger ones are scaled down to it, in their ratio; None: none are.
        min_pixels: smaller ones are scaled up to it.
        from_urls: images of http and https addresses are downloaded.
    """

    max_pixels: int | None = None
    min_pixels: int | None = None
    from_urls: bool = False


def kept(given: Any, rules: ImageRules, folders: Sequence[Path]) -> ImageFile:
    """Returns the file of an image.

    Args:
        given: a path, an http address, a data URL, base64, bytes, PIL's object, or an object with `bytes` or `path`
            (of `datasets`) or `url` (of OpenAI).
        folders: where relative paths are looked for first; then in ROOT_IMAGE_DIR, then in the working folder.

    Raises:
        RowFault: there is no such image, or it cannot be trained on.
        UsageError: the file that is made of it cannot be written.
    """
    from PIL import Image

    path: Path | None = None
    content = given
    if not isinstance(given, Image.Image):
        content = _content(given, rules, folders)
        if isinstance(content, Path):
            path = content
            content = _of_file(path)
        if not content:
            raise RowFault("it is empty")
    made = plain(content, rules)
    digest = hashlib.sha256(made.data).hexdigest()
    if made.data is not content:
        path = None
    try:
        place = path or keep_image(f"{digest}.{made.ending}", made.data)
    except OSError as error:
        raise UsageError(
            f"an image of a row cannot be kept in the cache: {error} (SWIFT_R1_CACHE names another folder)"
        ) from error
    return ImageFile(str(place), digest, made.width, made.height)


@dataclass(frozen=True, slots=True)
class PlainImage:
    """The file of an image that every reader shows alike: RGB, upright, one frame, as JPEG, PNG or WebP."""

    data: bytes
    ending: str
    width: int  # pixels
    height: int


_AS_IT_IS = ImageRules()


def plain(content: bytes | Image, rules: ImageRules = _AS_IT_IS) -> PlainImage:
    """Returns an image as a plain file: its own, the same object, where that is one, else a PNG. Raises RowFault."""
    from PIL import Image

    try:
        return _plain(content, rules)
    except (*_BROKEN, struct.error, zlib.error, Image.DecompressionBombError) as error:
        if isinstance(error, RowFault):
            raise
        raise RowFault(f"it cannot be decoded: {one_line(error, 200)}") from error


def _plain(content: bytes | Image, rules: ImageRules) -> PlainImage:
    image = _opened(content) if isinstance(content, bytes) else content
    ending = _ENDINGS.get(str(image.format))
    whole = _upright_rgb(image)
    size = _size(whole.size, rules)
    same = ending is not None and whole is image and size == whole.size
    if ending is not None and same and isinstance(content, bytes):
        return PlainImage(content, ending, *size)
    made = _png(whole if size == whole.size else whole.resize(size, _BILINEAR))
    return PlainImage(made, "png", *size)


_BILINEAR = 2  # as torchvision's Resize, with which ms-swift scales


def _content(given: Any, rules: ImageRules, folders: Sequence[Path]) -> bytes | Path:
    """Returns what is in the place of an image: its bytes, or where its file is."""
    if isinstance(given, Mapping):
        found = [given[name] for name in ("bytes", "path", "url", "image") if given.get(name)]
        if not found:
            raise RowFault("it has neither bytes nor a path")
        given = found[0]
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, os.PathLike):
        given = os.fspath(given)
    if not isinstance(given, str):
        raise RowFault(f"it is {a_kind(given)}, and neither a path nor the bytes of an image")
    text = given.strip()
    if not text:
        return b""
    if text.startswith(("http://", "https://")):
        return _downloaded(text, rules)
    if text.startswith("data:"):
        about, comma, coded = text.partition(",")
        if not comma or not about.endswith(";base64"):
            raise RowFault("it is a data URL without base64")
        return _unbased(coded)
    path = _path(text, folders)
    if path is None:
        return _unbased(text)
    return path


def _path(text: str, folders: Sequence[Path]) -> Path | None:
    """Returns the file that a text names; None where it is base64. Raises RowFault: there is none."""
    if len(text) > _LONGEST_PATH:
        return None
    named = Path(text.removeprefix("file://")).expanduser()
    root = os.environ.get("ROOT_IMAGE_DIR")
    places = [*folders, *([Path(root)] if root else []), Path()]
    found = [folder / named for folder in places if os.path.lexists(folder / named)]
    if found:
        return found[0].absolute()
    if len(text) > 64 and "." not in text:
        return None
    looked = ", ".join(dict.fromkeys(str(place.absolute()) for place in places))
    where = "" if named.is_absolute() else f" (looked in {looked})"
    raise RowFault(f"there is no file {text}{where}")


def _of_file(path: Path) -> bytes:
    try:
        return read_bytes(path, MOST_BYTES)
    except OSError as error:
        raise RowFault(f"{path} cannot be read: {error.strerror or error}") from error


def _unbased(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise RowFault(f"it is no base64: {error}") from error


def _downloaded(url: str, rules: ImageRules) -> bytes:
    """Returns what is at an address, which is asked three times where it does not answer."""
    import httpx

    shown = without_password(url)
    if not rules.from_urls:
        raise RowFault(f"{shown} is not downloaded without --load_images_from_urls true")
    why = ""
    for _ in range(_TRIES):
        until = time.monotonic() + _URL_S
        content = bytearray()
        try:
            with httpx.stream(
                "GET", url, follow_redirects=True, timeout=_URL_S, trust_env=not is_loopback(url)
            ) as answer:
                if answer.status_code != 200:
                    why = f"the server answered {answer.status_code}"
                    if answer.status_code < 500:
                        break
                    continue
                for part in answer.iter_bytes():
                    content += part
                    if len(content) > MOST_BYTES:
                        raise RowFault(f"{shown} has more than {MOST_BYTES >> 20} MiB")
                    if time.monotonic() > until:
                        raise httpx.ReadTimeout(f"not whole in {_URL_S:g} s")
                return bytes(content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = one_line(error, 200)
    raise RowFault(f"{shown} cannot be downloaded: {why}")


def _opened(content: bytes) -> Image:
    """Returns a decoded image. Raises RowFault, and whatever Pillow raises for what is damaged."""
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bombs, which are refused below, and of odd EXIF
        try:
            image = Image.open(io.BytesIO(content), formats=_FORMATS)
        except UnidentifiedImageError:
            raise RowFault(f"it is no image, or of a kind that is not read: {_READ}") from None
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise RowFault(
                f"it has {width:,} x {height:,} pixels, and {MOST_PIXELS:,} are the most"
            )
        frames = getattr(image, "n_frames", 1)
        if (
            frames > 1 and image.format != "MPO"
        ):  # a photograph with others of the same view behind it
            raise RowFault(f"it is animated, or has several pages: {frames} frames")
        image.load()
    return image


def _upright_rgb(image: Image) -> Image:
    """Returns an image as it is to be seen, without transparency; the same object where it is so already."""
    from PIL import Image, ImageOps

    if image.mode.startswith(("I", "F")):
        raise RowFault(f"it has more than 8 bits per colour ({image.mode}), which is not read")
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        own = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", own.size, "white"), own)
    return image if image.mode == "RGB" else image.convert("RGB")


def _size(size: tuple[int, int], rules: ImageRules) -> tuple[int, int]:
    """Returns the width and height within the rules, in the ratio of `size`; rounded as ms-swift does it."""
    width, height = size
    pixels = width * height
    most = rules.max_pixels
    least = rules.min_pixels
    if most is not None and pixels > most:
        tall = math.sqrt(most / (width / height))
        wide = min(max(1, int(tall * (width / height))), most)
        return wide, min(max(1, int(tall)), most // wide)
    if least is not None and pixels < least:
        tall = math.sqrt(least / (width / height))
        return math.ceil(tall * (width / height)), math.ceil(tall)
    return size


def _png(image: Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
