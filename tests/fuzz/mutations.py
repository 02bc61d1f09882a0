"""What can be wrong with a weight update: changes to its bodies, its headers, its order, and how it is sent."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from swift_r1.wire import protocol as wire
from tests.fuzz.pushes import Request, digest_of, json_request
from tests.serving.test_malformed import malformed

HUGE = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
HEADER_VALUES = (
    "",
    "0",
    "1",
    "-1",
    "+1",
    "1.0",
    "1e3",
    " 1",
    "01",
    "9" * 30,
    "9" * 4200,
    "9" * 5000,
    "NaN",
    "é",
    "\x00",
    "٣",
)
WAYS = (
    "cut",
    "promises less",
    "promises more",
    "chunked",
    "bad chunks",
    "two lengths",
    "both lengths",
    "expect",
    "half",
)
FILES = ("link", "dangling", "folder", "pipe", "sparse", "missing")
RAW = (
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"PUT /v1/weights/bucket HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"PUT /v1/weights/bucket HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000000000\r\n\r\nabc",
    b"POST /v1/weights/lease HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    b"POST /v1/weights/lease HTTP/1.1\r\n"
    + b"".join(b"X-%d: 1\r\n" % i for i in range(5000))
    + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00%ff%2e%2e/v1/../info HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /info HTTP/1.1\r\nHost: x\r\n\r\n" * 50,
    b"POST /v1/weights/begin HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    b"\r\n\r\n\r\n\x00\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /info HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n\r\n",
)

BytesChange = Callable[[random.Random, bytes], bytes]


def flip(rng: random.Random, body: bytes) -> bytes:
    new = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if new:
            # Most of a bucket is numbers, where any bit is fine: half of the flips are in what comes first.
            end = min(
                len(new), 16 if rng.random() < 0.2 else 600 if rng.random() < 0.5 else len(new)
            )
            new[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(new)


def truncate(rng: random.Random, body: bytes) -> bytes:
    return body[
        : rng.choice((0, 1, 7, 8, 9, 15, 16, 17, len(body) - 1, rng.randrange(len(body) + 1)))
    ]


def append(rng: random.Random, body: bytes) -> bytes:
    return body + rng.choice(
        (b"\x00", b"x" * 7, body[:100], rng.randbytes(rng.choice((1, 2, 1000, 100_000))))
    )


def duplicate_part(rng: random.Random, body: bytes) -> bytes:
    start, end = sorted(rng.randrange(len(body) + 1) for _ in range(2))
    return body[:end] + body[start:end] + body[end:]


def delete_part(rng: random.Random, body: bytes) -> bytes:
    start, end = sorted(rng.randrange(len(body) + 1) for _ in range(2))
    return body[:start] + body[end:]


def overwrite_part(rng: random.Random, body: bytes) -> bytes:
    if not body:
        return body
    start = rng.randrange(len(body))
    size = min(rng.choice((1, 4, 8, 100)), len(body) - start)
    return (
        body[:start]
        + rng.choice((b"\x00", b"\xff", b"[", b'"', b"9", b"\xc0")) * size
        + body[start + size :]
    )


def length_field(rng: random.Random, body: bytes) -> bytes:
    """The eight bytes before a safetensors header, or the number of words in a change."""
    at = rng.choice((0, 8))
    if len(body) < at + 8:
        return body
    (old,) = struct.unpack_from("<Q", body, at)
    new = (
        rng.choice(
            (*HUGE, old + 1, max(old - 1, 0), old * 2, len(body), len(body) - 8, len(body) + 8)
        )
        % 2**64
    )
    return body[:at] + struct.pack("<Q", new) + body[at + 8 :]


def noise(rng: random.Random, body: bytes) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 8, 100, 10_000)))


def header_table(rng: random.Random, body: bytes) -> bytes:
    """The safetensors header says something else of the same data."""
    try:
        (length,) = struct.unpack_from("<Q", body)
        table = json.loads(body[8 : 8 + length])
    except (struct.error, ValueError, RecursionError):
        return body
    if not isinstance(table, dict) or not table:
        return body
    name = rng.choice(list(table))
    entry = table[name]
    # it was changed before
    if not isinstance(entry, dict) or not {"shape", "data_offsets"} <= entry.keys():
        return body
    if not all(isinstance(number, int) for number in entry["data_offsets"]):
        return body
    numbers: tuple[Any, ...] = (*HUGE, -1, -(2**63), 1.5, None, "1", [1], float("nan"), 10**400)
    what = rng.randrange(14)
    if what == 0:
        entry["dtype"] = rng.choice(
            ("F32", "F16", "BF16", "F64", "I8", "U64", "F8_E4M3", "C64", "", "f32", None, 7, "F4")
        )
    elif what == 1:
        entry["shape"] = [rng.choice(numbers) for _ in range(rng.randrange(4))]
    elif what == 2:
        entry["shape"] = entry["shape"][::-1] + rng.choice(([], [1], [0], [2**32, 2**32], [-1, -1]))
    elif what == 3:
        entry["data_offsets"] = [rng.choice(numbers) for _ in range(rng.choice((0, 1, 2, 2, 2, 3)))]
    elif what == 4:
        entry["data_offsets"] = [at + rng.choice((-8, -1, 1, 2, 8)) for at in entry["data_offsets"]]
    elif what == 5:
        entry["data_offsets"] = entry["data_offsets"][::-1]
    elif what == 6:  # two tensors in the same place
        other = table[rng.choice(list(table))]
        entry["data_offsets"] = list(other.get("data_offsets", [0, 0]))
    elif what == 7:
        odd = (
            "",
            "a" * 5000,
            "lm_head.weight",
            "../../x",
            "\x00",
            "__metadata__",
            "model.norm.bias",
            "\u202e",
        )
        table = {rng.choice(odd) if key == name else key: value for key, value in table.items()}
    elif what == 8:
        table["__metadata__"] = rng.choice(
            ({}, {"format": "pt"}, {"a": 1}, [], None, {"a": "b" * 100_000}, {"a": {}})
        )
    elif what == 9:
        table["extra"] = rng.choice(
            (entry, {}, None, 5, {**entry, "shape": [0], "data_offsets": [0, 0]})
        )
    elif what == 10:
        del table[name]
    elif what == 11:
        entry[rng.choice(("extra", "dtype ", ""))] = 1
    elif what == 12:
        table = dict(reversed(list(table.items())))
    text = json.dumps(table)
    if what == 13:  # the same name twice
        text = text[:-1] + ", " + json.dumps({name: entry})[1:]
    text = rng.choice(
        (
            text,
            text,
            text,
            text + " " * rng.choice((1, 7, 1000, 300_000)),
            " " + text,
            "[" * 3000 + text,
        )
    )
    raw = text.encode()
    if rng.random() < 0.7:
        raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + body[8 + length :]


def not_numbers(rng: random.Random, body: bytes) -> bytes:
    """NaN and infinities in the data: bytes like any others, to the server."""
    return (
        body[:-64]
        + rng.choice((b"\xff\xff\xff\x7f", b"\x00\x00\x80\x7f", b"\x80\x7f\xc0\xff")) * 16
        if len(body) > 64
        else body
    )


BODIES: tuple[BytesChange, ...] = (
    *(flip, flip, truncate, append, duplicate_part, delete_part, overwrite_part, length_field),
    *(noise, header_table, header_table, header_table, not_numbers),
)


def mutate(rng: random.Random, requests: list[Request], other: list[bytes]) -> list[Request]:
    """One to three changes to an update; `other` are buckets of another version."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        requests = rng.choices(
            (_a_body, _a_header, _the_order, _the_way, _someone_else, _a_commit),
            weights=(8, 3, 3, 2, 2, 2),
        )[0](rng, list(requests), other)
    return requests


def _a_body(rng: random.Random, requests: list[Request], other: list[bytes]) -> list[Request]:
    at = rng.randrange(len(requests))
    one = requests[at]
    # a server goes where it is sent: another address might be somebody's
    if one.path == "/v1/weights/relay":
        return requests
    if one.header("Content-Type") is not None:  # JSON
        try:
            requests[at] = replace(one, body=malformed(rng, json.loads(one.body)))
        except (ValueError, IndexError, RecursionError):  # it is broken already, or empty
            requests[at] = replace(one, body=rng.choice(BODIES)(rng, one.body))
        return requests
    if one.method == "FILE" and rng.random() < 0.3:
        requests[at] = replace(one, how=rng.choice(FILES))
        return requests
    body = rng.choice(other) if rng.random() < 0.1 else rng.choice(BODIES)(rng, one.body)
    if one.method == "PUT" and one.header(wire.BASE_HEADER) is None and rng.random() < 0.6:
        # The hash of what is sent: else all of it ends at the hash.
        one = one.with_header(
            wire.DIGEST_HEADER, rng.choice((digest_of(body), digest_of(body), None))
        )
    if one.method == "FILE" and at + 1 < len(requests) and rng.random() < 0.7:
        about = _json(requests[at + 1])
        requests[at + 1] = json_request("/v1/weights/file", about | {"digest": digest_of(body)})
    requests[at] = replace(one, body=body)
    return requests


def _a_header(rng: random.Random, requests: list[Request], other: list[bytes]) -> list[Request]:
    at = rng.randrange(len(requests))
    one = requests[at]
    name = rng.choice(
        (
            wire.VERSION_HEADER,
            wire.BUCKET_HEADER,
            wire.DIGEST_HEADER,
            wire.BASE_HEADER,
            wire.LEASE_HEADER,
            "Content-Type",
            "Authorization",
            "Transfer-Encoding",
            "Content-Encoding",
            "Range",
            "Host",
        )
    )
    values = (
        *HEADER_VALUES,
        *map(str, HUGE),
        None,
        "0" * 32,
        "f" * 32,
        "F" * 32,
        "0" * 31,
        "gzip",
        "bytes=0-1",
        "a" * 9000,
    )
    requests[at] = one.with_header(name, rng.choice(values))
    return requests


def _the_order(rng: random.Random, requests: list[Request], other: list[bytes]) -> list[Request]:
    what, at = rng.randrange(6), rng.randrange(len(requests))
    if what == 0:
        rng.shuffle(requests)
    elif what == 1:
        requests.insert(rng.randrange(len(requests) + 1), requests[at])
    elif what == 2:
        del requests[at]
    elif what == 3:
        requests = requests[: at + 1]
    elif what == 4 and at + 1 < len(requests):
        requests[at], requests[at + 1] = requests[at + 1], requests[at]
    else:
        requests = requests + requests
    return requests or [json_request("/v1/weights/abort", {"version": 1})]


def _the_way(rng: random.Random, requests: list[Request], other: list[bytes]) -> list[Request]:
    if rng.random() < 0.3:
        raw = Request("RAW", "", body=rng.choice(RAW))
        requests.insert(rng.randrange(len(requests) + 1), raw)
        return requests
    at = rng.randrange(len(requests))
    if requests[at].method not in ("FILE", "RAW"):
        requests[at] = replace(requests[at], how=rng.choice(WAYS))
    return requests


def _someone_else(rng: random.Random, requests: list[Request], other: list[bytes]) -> list[Request]:
    """A second writer, without the lease or with an older one; or the same one, twice at once."""
    at = rng.randrange(len(requests))
    one = requests[at]
    if one.method in ("FILE", "RAW"):
        return requests
    if rng.random() < 0.4:
        requests[at] = replace(one, how="twice at once")
        return requests
    stranger = rng.choice(
        (
            one.with_header(wire.LEASE_HEADER, "0" * 32),
            one.with_header(wire.LEASE_HEADER, ""),
            json_request("/v1/weights/lease", {"owner": "other", "ttl_seconds": 0.01}),
            json_request(
                "/v1/weights/lease", {"owner": "other", "ttl_seconds": 0.01, "token": "a" * 32}
            ),
            Request("DELETE", "/v1/weights/lease", ((wire.LEASE_HEADER, "1" * 32),)),
        )
    )
    requests.insert(at, stranger)
    return requests


def _a_commit(rng: random.Random, requests: list[Request], other: list[bytes]) -> list[Request]:
    """What ends or replaces an update, too early or with other words; and what this server does not have."""
    version = rng.choice((0, 1, 2, *HUGE))
    tensor = {"name": "model.norm.weight", "dtype": "float32", "shape": [16]}
    more = rng.choice(
        (
            json_request(
                "/v1/weights/commit",
                {"version": version, "buckets": rng.randrange(4), "content_hash": "0" * 32},
            ),
            json_request("/v1/weights/abort", {"version": version}),
            json_request(
                "/v1/weights/begin", {"version": version, "relays": rng.choice((0, 1, 1000, -1))}
            ),
            json_request(
                "/v1/weights/begin",
                {
                    "version": version,
                    "adapter": {"rank": 4, "alpha": 1, "target_modules": ["q_proj"]},
                },
            ),
            json_request("/v1/weights/channel", {"unique_id": "A" * 171 + "=", "world_size": 2}),
            json_request(
                "/v1/weights/stream", {"version": version, "index": 0, "tensors": [tensor]}
            ),
            json_request(
                "/v1/weights/relay",
                {"version": version, "url": "http://127.0.0.1:9", "lease": "0" * 32},
            ),
            json_request("/v1/sleep", {"level": rng.choice((1, 2, 3))}),
            json_request("/v1/wake", {}),
            Request("GET", "/v1/weights/update"),
        )
    )
    requests.insert(rng.randrange(len(requests) + 1), more)
    return requests


def _json(request: Request) -> dict[str, Any]:
    try:
        found = json.loads(request.body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
