"""The update's parts without an engine: state machine, staging, safetensors headers."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_r1.sync.buckets import TensorEntry, bucket_digest, content_hash, read_header
from swift_r1.sync.staging import StagedBucket, Staging
from swift_r1.sync.update import UpdateMachine
from swift_r1.wire.protocol import HTTPError
from tests.live_servers import to_bytes

EXPECTED = {"a": (2, 3), "b": (4,)}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def bucket(index: int, *names: str) -> StagedBucket:
    digest = bucket_digest(f"{index}{names}".encode())
    return StagedBucket(
        index,
        Path("/nowhere"),
        digest,
        {name: TensorEntry("BF16", EXPECTED[name]) for name in names},
    )


@pytest.fixture
def discarded() -> list[StagedBucket]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def machine(clock: Clock, discarded: list[StagedBucket]) -> UpdateMachine:
    return UpdateMachine(EXPECTED, clock, 60, discarded.extend)


def test_parts_of_a_tower_come_whole_or_not_at_all(clock: Clock) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        name: (2,)
        for name in (
            "model.layers.0.up.weight",
            "visual.blocks.0.up.weight",
            "visual.blocks.0.up.bias",
            "visual.merger.up.weight",
        )
    }
    language, weight, bias, merger = shapes
    machine = UpdateMachine(shapes, clock, 60)
    token = machine.take_lease("trainer", 10)

    def sent(*names: str) -> str:
        machine.begin(token, machine.version + 1)
        tensors = {name: TensorEntry("BF16", (2,)) for name in names}
        part = StagedBucket(0, Path("/nowhere"), bucket_digest(str(names).encode()), tensors)
        machine.add_bucket(token, machine.version + 1, part)
        try:
            machine.start_loading(token, machine.version + 1, 1, content_hash([part.digest]))
        except HTTPError as error:
            return error.message.rpartition(": ")[2]
        machine.loaded()
        return ""

    assert sent(language) == sent(language, merger) == sent(language, weight, bias) == ""
    assert sent(language, weight, merger) == bias
    assert sent(weight, bias, merger) == language
    assert sent(*shapes) == ""


def test_an_update_that_stands_still_is_given_up_before_its_long_lease(
    machine: UpdateMachine, clock: Clock
) -> None:
    token = machine.take_lease("trainer", 1000)
    machine.begin(token, 1)
    clock.now = 50
    machine.add_bucket(token, 1, bucket(0, "a"))
    clock.now = 100
    assert machine.expire() is None
    clock.now = 110
    assert machine.expire() == "trainer left the update to version 1 for 60 s"
    with pytest.raises(HTTPError, match="no update is open"):
        machine.add_bucket(token, 1, bucket(1, "b"))
    machine.begin(token, 1)


def test_a_lease_does_not_expire_while_the_engine_loads(
    machine: UpdateMachine, clock: Clock
) -> None:
    token = machine.take_lease("trainer", 10)
    machine.begin(token, 1)
    whole = bucket(0, "a", "b")
    machine.add_bucket(token, 1, whole)
    machine.start_loading(token, 1, 1, content_hash([whole.digest]))
    clock.now = 100
    assert machine.expire() is None
    with pytest.raises(HTTPError):
        machine.take_lease("another", 10)
    machine.loaded()
    assert machine.version == 1 and machine.owner == "trainer"


def test_repeated_and_misplaced_buckets(
    machine: UpdateMachine, discarded: list[StagedBucket]
) -> None:
    token = machine.take_lease("trainer", 10)
    machine.begin(token, 3)
    machine.add_bucket(token, 3, bucket(0, "a"))
    machine.add_bucket(token, 3, bucket(0, "a"))
    assert machine.staged == 1 and len(discarded) == 1
    for refused, sentence in [
        (bucket(0, "b"), "came twice with different bytes"),
        (bucket(2, "b"), "out of order, the next one is 1"),
        (bucket(1, "a"), "a was sent twice"),
    ]:
        with pytest.raises(HTTPError, match=sentence):
            machine.add_bucket(token, 3, refused)
    with pytest.raises(HTTPError, match="version 3 is being updated, not 2"):
        machine.add_bucket(token, 2, bucket(1, "b"))
    with pytest.raises(HTTPError, match="1 of 2 weights were not sent: b"):
        machine.start_loading(token, 3, 1, content_hash([bucket(0, "a").digest]))
    assert machine.pending_version is None


Steps = st.lists(
    st.sampled_from(
        ["lease", "steal", "begin", "a", "b", "commit", "load", "fail", "abort", "wait", "release"]
    ),
    max_size=40,
)


@given(Steps)
def test_no_order_of_calls_serves_a_mixture(steps: list[str]) -> None:
    """Whatever is called: a version is served only after all weights were loaded, and versions only rise."""
    clock = Clock()
    machine = UpdateMachine(EXPECTED, clock, 5, lambda _buckets: None)
    token: str | None = None
    loading, sent = False, []
    for step in steps:
        before = machine.version
        try:
            if step == "lease":
                token = machine.take_lease("me", 10, "0" * 32)
            elif step == "steal":
                machine.take_lease("thief", 10)
            elif step == "begin":
                machine.begin(token, machine.version + 1)
                sent = []
            elif step in ("a", "b"):
                machine.add_bucket(token, machine.version + 1, bucket(len(sent), step))
                sent.append(bucket(len(sent), step))
            elif step == "commit":
                parts = machine.start_loading(
                    token,
                    machine.version + 1,
                    len(sent),
                    content_hash(part.digest for part in sent),
                )
                loading = True
                assert {name for part in parts for name in part.tensors} == set(EXPECTED)
            elif step in ("load", "fail") and loading:
                loading = False
                machine.loaded() if step == "load" else machine.failed("broken")
                assert machine.version == before + (step == "load")
                continue
            elif step == "abort":
                machine.abort(token, machine.pending_version or 1)
            elif step == "wait":
                clock.now += 11
                machine.expire()
            elif step == "release":
                machine.release(token)
        except HTTPError as refused:
            assert refused.status in (409, 422)
        assert machine.version == before
        assert loading == (machine.pending_version is not None and loading)


def safetensors(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "not a complete safetensors file"),
        (b"\xff" * 64, "not a complete safetensors file"),
        (struct.pack("<Q", 3) + b"{{{", "not a complete safetensors file: .*invalid JSON"),
        (safetensors([], b""), "invalid JSON"),
        (safetensors({}, b""), "holds no tensor"),
        (safetensors({"a": {"dtype": "F32"}}, b""), "missing field"),
        (
            safetensors({"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
            "dtype I64",
        ),
        (
            safetensors({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)),
            "invalid shape",
        ),
        (
            safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, bytes(16)),
            "invalid offset",
        ),
        (
            safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(7)),
            "not fully covered",
        ),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, body: bytes, sentence: str) -> None:
    path = tmp_path / "bucket"
    path.write_bytes(body)
    with pytest.raises(HTTPError, match=sentence):
        read_header(path)


def test_staging_streams_hashes_and_limits() -> None:
    staging = Staging(max_bytes=2000)
    body = to_bytes([("a", torch.ones(100))])

    async def chunks(whole: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(whole), 7):
            yield whole[start : start + 7]

    def write(whole: bytes, digest: str | None) -> StagedBucket:
        return asyncio.run(staging.write(0, chunks(whole), digest))

    try:
        staged = write(body, bucket_digest(body))
        assert staged.path.read_bytes() == body and staged.digest == bucket_digest(body)
        with pytest.raises(HTTPError, match="their hash differs"):
            write(body[:-1] + b"x", bucket_digest(body))
        with pytest.raises(HTTPError, match="larger than the whole model"):
            write(bytes(3000), None)
        assert list(staging.folder.iterdir()) == [staged.path]
    finally:
        staging.close()
    assert not staging.folder.exists()
