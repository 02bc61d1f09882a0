"""Valid weight updates as the requests that they are made of, and what a server holds afterwards: read and changed here
once more, apart from the code that is tested."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from swift_r1.sync.buckets import changed_words, encode_change, header_of
from swift_r1.wire import protocol as wire
from tests.fuzz.held_server import fingerprint

SMALL = {
    "model.embed_tokens.weight": (40, 16),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.v_proj.weight": (8, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.norm.weight": (16,),
}
# more than a chunk of the staging
LARGE = {"model.embed_tokens.weight": (1100, 1000), "model.norm.weight": (1000,)}
TARGETS = ("q_proj", "v_proj")
RANK = 4
_WIDTH = {"F32": 4, "BF16": 2, "F16": 2}
_TORCH = {"F32": "torch.float32", "BF16": "torch.bfloat16", "F16": "torch.float16"}

Adapter = Mapping[str, Any] | None
Held = dict[str, tuple[str, tuple[int, ...], bytes]]  # name to dtype, shape, bytes


@dataclass(frozen=True)
class Request:
    """`how`: `plain`, or a way to send it that no HTTP library would. `path` is a route, or the name of a file for the
    staging folder (`method` FILE)."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    how: str = "plain"

    def with_header(self, name: str, value: str | None) -> Request:
        kept = tuple(one for one in self.headers if one[0] != name)
        return replace(self, headers=kept if value is None else (*kept, (name, value)))

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


@dataclass
class Base:
    """The whole version that a server has kept for changes: its buckets and their content hash."""

    buckets: list[bytes] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return hash_of(self.buckets)


def digest_of(body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(body)


def hash_of(buckets: list[bytes]) -> str:
    return digest_of(b"".join(bytes.fromhex(digest_of(one)) for one in buckets))


def json_request(path: str, body: Mapping[str, Any], method: str = "POST") -> Request:
    return Request(method, path, (("Content-Type", "application/json"),), json.dumps(body).encode())


def bucket_request(
    version: int, index: int, body: bytes, digest: str | None, base: str | None = None
) -> Request:
    headers = [(wire.VERSION_HEADER, str(version)), (wire.BUCKET_HEADER, str(index))]
    if digest is not None:
        headers.append((wire.DIGEST_HEADER, digest))
    if base is not None:
        headers.append((wire.BASE_HEADER, base))
    return Request("PUT", "/v1/weights/bucket", tuple(headers), body)


def adapter_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, shape in SMALL.items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            shapes[f"base_model.model.{module}.lora_A.weight"] = (RANK, shape[1])
            shapes[f"base_model.model.{module}.lora_B.weight"] = (shape[0], RANK)
    return shapes


def buckets_of(rng: random.Random, shapes: Mapping[str, tuple[int, ...]]) -> list[bytes]:
    """New weights, in one bucket or several."""
    dtype = rng.choice(("F32", "BF16", "F16"))
    names = list(shapes)
    cuts = sorted({0, len(names), *(rng.randrange(len(names)) for _ in range(rng.randrange(3)))})
    buckets = []
    for start, end in pairwise(cuts):
        chosen = names[start:end]
        header = header_of([(name, dtype, shapes[name]) for name in chosen])
        buckets.append(
            header + rng.randbytes(sum(prod(shapes[name]) for name in chosen) * _WIDTH[dtype])
        )
    return buckets


def push_of(version: int, buckets: list[bytes], adapter: Adapter = None) -> list[Request]:
    """By `PUT`, whole."""
    puts = [
        bucket_request(version, index, one, digest_of(one)) for index, one in enumerate(buckets)
    ]
    return [begin_of(version, adapter), *puts, commit_of(version, buckets)]


def begin_of(version: int, adapter: Adapter) -> Request:
    about: dict[str, Any] = {"version": version}
    return json_request(
        "/v1/weights/begin", about if adapter is None else about | {"adapter": adapter}
    )


def commit_of(version: int, buckets: list[bytes]) -> Request:
    about = {"version": version, "buckets": len(buckets), "content_hash": hash_of(buckets)}
    return json_request("/v1/weights/commit", about)


def file_push_of(version: int, buckets: list[bytes], adapter: Adapter = None) -> list[Request]:
    """Through files in the server's folder."""
    requests = [begin_of(version, adapter)]
    for index, one in enumerate(buckets):
        requests.append(Request("FILE", f"incoming-{index:06d}", body=one))
        about = {"version": version, "index": index, "digest": digest_of(one)}
        requests.append(json_request("/v1/weights/file", about))
    return [*requests, commit_of(version, buckets)]


def change_push_of(
    rng: random.Random, version: int, base: Base, adapter: Adapter = None
) -> tuple[list[Request], list[bytes]]:
    """As what has changed in `base`; the new buckets too."""
    requests, new = [begin_of(version, adapter)], []
    for index, old in enumerate(base.buckets):
        start = 8 + struct.unpack_from("<Q", old)[0]
        words = np.frombuffer(old, np.uint16).copy()
        places = [rng.randrange(start // 2, len(words)) for _ in range(rng.choice((0, 1, 5, 300)))]
        words[places] ^= np.uint16(1 + rng.randrange(0xFFFF))
        body = encode_change(words, changed_words(words, np.frombuffer(old, np.uint16)))
        requests.append(
            bucket_request(version, index, body, digest_of(words.tobytes()), base.digest)
        )
        new.append(words.tobytes())
    return [*requests, commit_of(version, new)], new


def tensors_of(body: bytes) -> Held:
    """What a safetensors file holds; the server has found it whole."""
    (length,) = struct.unpack_from("<Q", body)
    table = json.loads(body[8 : 8 + length])
    table.pop("__metadata__", None)
    data = body[8 + length :]
    return {
        name: (
            one["dtype"],
            tuple(one["shape"]),
            data[one["data_offsets"][0] : one["data_offsets"][1]],
        )
        for name, one in table.items()
    }


def changed(old: bytes, change: bytes) -> bytes:
    """The slow way to apply a change that the server has taken."""
    _, width, count = struct.unpack_from("<4sIQ", change)
    new, place = bytearray(old), -1
    for number in range(count):
        gap = 16 + number * width
        place += int.from_bytes(change[gap : gap + width], "little")
        value = 16 + count * width + number * 2
        new[2 * place : 2 * place + 2] = change[value : value + 2]
    return bytes(new)


def expected_fingerprint(held: Held, adapter: Adapter) -> tuple[float, ...]:
    digests = sorted(
        (name, _TORCH[dtype], list(shape), xxhash.xxh3_128_hexdigest(raw))
        for name, (dtype, shape, raw) in held.items()
    )
    about = None
    if adapter is not None:
        targets = list(adapter["target_modules"])
        about = [
            adapter["rank"],
            float(adapter["alpha"]),
            targets,
            bool(adapter.get("rslora", False)),
        ]
    return fingerprint(json.dumps([digests, about]).encode())


def put_file(folder: Path, request: Request) -> None:
    """Of a request with method FILE; `how` says what it is to be instead of a file."""
    path = folder / request.path
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    if request.how == "link":
        path.symlink_to("/etc/hostname")
    elif request.how == "dangling":
        path.symlink_to("nowhere")
    elif request.how == "folder":
        path.mkdir()
    elif request.how == "pipe":
        os.mkfifo(path)
    elif request.how == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif request.how != "missing":
        path.write_bytes(request.body)
