"""Images as a user names them: the machine's own programs, a folder, an OCI layout on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_r1.runtime.files import read_text, regular
from swift_r1.sandboxes.base import SandboxError
from swift_r1.sandboxes.local.rootfs import HOST

_LAYOUT = "oci-layout"
_TAG = "org.opencontainers.image.ref.name"
_PLATFORM = {"os": "linux", "architecture": "amd64"}
_DIGEST = re.compile("sha256:([0-9a-f]{64})")
# how archives begin
_GZIP = b"\x1f\x8b"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_READ_BYTES = 1 << 20
_TEXT_BYTES = 8 << 20  # at most, of an index, a manifest or a configuration


@dataclass(frozen=True, slots=True)
class Image:
    """What the root of a sandbox is made of.

    Attributes:
        folder: with the root in it, or HOST; the layers' is made of them.
        layers: archives, the lowest first; none where the folder is there.
        env: variables that its commands have.
    """

    folder: str
    layers: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def images_folder() -> Path:
    """Returns where layers are unpacked to: in SWIFT_R1_CACHE, else in the user's cache folder."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "swift-r1"
    return Path(os.environ.get("SWIFT_R1_CACHE") or own) / "sandboxes"


def find_image(name: str) -> Image:
    """Returns the image of a name: `host`, a folder with a root in it, or an OCI layout, which may have `:TAG` behind it.
    Raises SandboxError: there is none, or it is damaged, or for another machine."""
    if name == HOST:
        return Image(HOST)
    path, tag = Path(name), ""
    if not path.exists() and ":" in path.name:
        first, _, tag = path.name.rpartition(":")
        path = path.with_name(first)
    if not path.is_dir():
        raise SandboxError(f"the image {name} is neither {HOST!r} nor a folder nor an OCI layout")
    if not (path / _LAYOUT).is_file():
        return Image(str(path.resolve()))
    try:
        return _layered(path.resolve(), tag)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SandboxError(f"the OCI layout {name} cannot be read: {error}") from None


def is_compressed(layer: Path) -> bool:
    """Says whether an archive is compressed with gzip. Raises OSError; SandboxError: it is, but otherwise."""
    with open(layer, "rb", opener=regular) as file:
        first = file.read(8)
    if first.startswith(_ZSTANDARD):
        raise SandboxError(
            f"{layer} is compressed with zstd; `skopeo copy --dest-compress-format gzip` changes it"
        )
    return first.startswith(_GZIP)


def check_layer(layer: Path) -> None:
    """Raises SandboxError: the file is not what its name says."""
    method = hashlib.sha256()
    with open(layer, "rb", opener=regular) as file:
        block = file.read(_READ_BYTES)
        while block:
            method.update(block)
            block = file.read(_READ_BYTES)
    if method.hexdigest() != layer.name:
        raise SandboxError(f"{layer} is damaged: it has another hash than its name says")


def _layered(layout: Path, tag: str) -> Image:
    index = json.loads(read_text(layout / "index.json"))
    found = index["manifests"]
    if tag:
        found = [one for one in found if one.get("annotations", {}).get(_TAG) == tag]
    digest, manifest = _manifest(layout, found)
    config = _text(layout, manifest["config"]["digest"]).get("config") or {}
    layers = tuple(_blob(layout, one["digest"]) for one in manifest["layers"])
    env = dict(word.split("=", 1) for word in config.get("Env") or [])
    return Image(str(images_folder() / digest.replace(":", "-")), layers, env)


def _manifest(layout: Path, found: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Returns the digest and the manifest of the one image among `found` that is for this machine."""
    fitting = [one for one in found if _fits(one.get("platform"))]
    if len(fitting) != 1:
        tags = [one.get("annotations", {}).get(_TAG, "?") for one in fitting]
        raise ValueError(f"it has {len(fitting)} images for {_PLATFORM}: {', '.join(tags)}")
    digest = fitting[0]["digest"]
    text = _text(layout, digest)
    return _manifest(layout, text["manifests"]) if "manifests" in text else (digest, text)


def _fits(platform: Mapping[str, str] | None) -> bool:
    return platform is None or all(platform.get(key) == _PLATFORM[key] for key in _PLATFORM)


def _text(layout: Path, digest: str) -> dict[str, Any]:
    with open(_blob(layout, digest), "rb", opener=regular) as file:
        content = file.read(_TEXT_BYTES)
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise ValueError(f"{digest} is damaged: it has another hash")
    text: dict[str, Any] = json.loads(content)
    return text


def _blob(layout: Path, digest: str) -> Path:
    found = _DIGEST.fullmatch(digest)
    if found is None:
        raise ValueError(f"{digest!r} is no SHA-256")
    return layout / "blobs" / "sha256" / found[1]
