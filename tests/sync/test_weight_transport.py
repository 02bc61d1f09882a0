"""The ways for weights: the same bytes arrive by each, changed ones are refused, and gathering overlaps sending."""

from __future__ import annotations

import logging
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swift_r1.errors import RunFailed
from swift_r1.serving.engines.base import EngineInfo
from swift_r1.sync import transport
from swift_r1.sync.buckets import parts_digest
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import ServerRefused
from tests.live_servers import push_weights

Tensors = dict[str, torch.Tensor]
EXPECTED = {"a": (3, 5), "b": (7,), "c": (0, 2), "d": ()}


class LoadingEngine:
    """Keeps what it was given to load."""

    dead = False
    scores_alone = False

    def __init__(self) -> None:
        self.info = EngineInfo("loading", "0", 10, "", 100, "float32")
        self.loaded: Tensors = {}
        self.files: list[Path] = []

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        self.files = list(files)
        self.loaded = {
            name: tensor.clone() for file in files for name, tensor in load_file(file).items()
        }

    def shutdown(self) -> None: ...


def weights(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in EXPECTED.items()}
    return made | {
        "a": torch.randn(5, 3, generator=generator).T,
        "b": made["b"].bfloat16(),
        "d": made["d"].half(),
    }


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.fixture
def engine() -> LoadingEngine:
    return LoadingEngine()


@pytest.fixture
def client(engine: LoadingEngine, serve_engine: Callable[..., str]) -> Iterator[RolloutClient]:
    with RolloutClient(serve_engine(engine, EXPECTED)) as client:
        yield client


@pytest.mark.parametrize("way", ["shm", "http", "auto"])
def test_the_same_bytes_arrive_by_each_way(
    client: RolloutClient, engine: LoadingEngine, way: str
) -> None:
    for version in (1, 2):
        sent = weights(version)
        buckets = [[(name, tensor)] for name, tensor in sent.items()]
        assert push_weights(client, version, buckets, way).weight_version == version
        assert same(engine.loaded, sent)
    folder = engine.files[0].parent
    # Nothing is left of it but its memory, which the next version is written to; shorter ones are cut off.
    assert not list(folder.glob("bucket-*")) and len(list(folder.glob("incoming-*"))) == len(
        buckets
    )
    names = list(sent)
    again = [[(names[0], sent[names[0]])], [(name, sent[name]) for name in names[1:]]]
    assert push_weights(client, 3, again[::-1], way).weight_version == 3
    assert same(engine.loaded, sent)


def test_a_file_that_changed_or_is_not_there_is_refused(
    client: RolloutClient, engine: LoadingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips after the trainer has hashed it; a file elsewhere; then a good push."""
    honest = transport.write_file

    def flips_a_bit(path: Path, parts: Sequence[memoryview]) -> str:
        digest = honest(path, parts)
        body = bytearray(path.read_bytes())
        body[-3] ^= 1
        path.write_bytes(body)
        return digest

    buckets = [list(weights(1).items())]
    monkeypatch.setattr("swift_r1.sync.writer.write_file", flips_a_bit)
    with pytest.raises(ServerRefused, match="other bytes than were promised"):
        push_weights(client, 1, buckets, "shm")
    monkeypatch.setattr("swift_r1.sync.writer.write_file", lambda path, parts: parts_digest(parts))
    with pytest.raises(ServerRefused, match="not in this server's shared memory"):
        push_weights(client, 1, buckets, "shm")

    elsewhere = tmp_path / "precious"
    elsewhere.write_text("as it was")

    def links_elsewhere(path: Path, parts: Sequence[memoryview]) -> str:
        path.symlink_to(elsewhere)
        linked.append(path)
        return "0" * 32

    linked: list[Path] = []
    monkeypatch.setattr("swift_r1.sync.writer.write_file", links_elsewhere)
    with pytest.raises(ServerRefused, match="not in this server's shared memory"):
        push_weights(client, 1, buckets, "shm")
    assert not engine.loaded and client.info().weight_version == 0
    folder = Path(linked[-1]).parent
    monkeypatch.undo()
    # Nor does a link that lies there already lead an upload astray.
    (folder / "incoming-000000").unlink(missing_ok=True)
    (folder / "incoming-000000").symlink_to(elsewhere)
    assert push_weights(client, 1, buckets, "http").weight_version == 1
    assert elsewhere.read_text() == "as it was"


def test_shared_memory_of_another_host_is_not_used(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swift_r1.sync.writer.usable_folder", lambda _folder: None)
    buckets = [list(weights(1).items())]
    with pytest.raises(RunFailed, match=r"--weight_transport shm: .*use http"):
        push_weights(client, 1, buckets, "shm")
    assert push_weights(client, 1, buckets, "auto").weight_version == 1
    assert (
        transport.usable_folder(None) is None and transport.usable_folder("/no/such/folder") is None
    )


def test_a_server_cannot_have_weights_written_elsewhere(tmp_path: Path) -> None:
    own = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="swift-r1-test-"))
    (link := own.with_name(f"{own.name}-link")).symlink_to(tmp_path)
    try:
        assert transport.usable_folder(str(own)) == own
        for elsewhere in (
            str(tmp_path),
            "/dev/shm",
            "/dev/shm/..",
            f"/dev/shm/../{tmp_path}",
            f"{own}/..",
            str(link),
        ):
            assert transport.usable_folder(elsewhere) is None
    finally:
        link.unlink()
        own.rmdir()


def test_the_next_bucket_is_gathered_while_one_is_sent() -> None:
    """Each side waits for the other, which without overlap would never end."""
    gathering, sending = threading.Barrier(2), []

    def items() -> Iterator[int]:
        yield 0
        gathering.wait(20)
        yield 1

    def send(index: int, item: int) -> str:
        if index == 0:
            gathering.wait(20)
        sending.append((index, item))
        return str(item)

    assert transport.overlapped(items(), send) == ["0", "1"]
    assert sending == [(0, 0), (1, 1)]


@pytest.fixture
def small_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shared memory of 256 KiB, and a disk of as much."""
    folders = [tmp_path / "shm", tmp_path / "disk"]
    for folder in folders:
        folder.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True
        )
        if mounted.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    for module in ("staging", "transport"):
        monkeypatch.setattr(f"swift_r1.sync.{module}._SHARED_MEMORY", folders[0])
    monkeypatch.setattr("tempfile.tempdir", str(folders[1]))
    # What another engine's weights will take is free when this one starts.
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _folder: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
    )
    yield tmp_path
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_push_goes_on_by_http_where_shared_memory_is_full(
    small_memory: Path, serve_engine: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """The server takes to its disk what shared memory has no room for; where that is full too, it says so."""
    engine = LoadingEngine()
    shapes = {"a": (16384,), "b": (24576,), "c": (16384,)}
    sent = {name: torch.randn(shape) for name, shape in shapes.items()}  # 64, 96 and 64 KiB
    buckets = [[(name, tensor)] for name, tensor in sent.items()]
    caplog.set_level(logging.WARNING)
    with RolloutClient(serve_engine(engine, shapes)) as client:
        other_engine = small_memory / "shm" / "taken"
        other_engine.write_bytes(bytes(100 << 10))
        assert push_weights(client, 1, buckets, "auto").weight_version == 1
        assert same(engine.loaded, sent)
        said = [one.getMessage() for one in caplog.records]
        assert sum("the rest of this version goes by http" in one for one in said) == 1
        assert sum("they go to disk" in one for one in said) == 1  # the third has room again
        # Nothing stays on the disk, and the next version tries shared memory again.
        assert not list((small_memory / "disk").rglob("bucket-*"))
        other_engine.unlink()
        caplog.clear()
        assert push_weights(client, 2, buckets, "auto").weight_version == 2 and not caplog.records
        for spare in (small_memory / "shm").rglob("incoming-*"):
            spare.unlink()
        for folder in ("shm", "disk"):
            (small_memory / folder / "taken").write_bytes(bytes(200 << 10))
        with pytest.raises(
            ServerRefused, match=r"507: weights cannot be staged in .*No space left on device"
        ) as full:
            push_weights(client, 3, buckets, "auto")
        assert full.value.status == 507
        assert client.info().weight_version == 2
        other_engine.unlink()
        assert push_weights(client, 3, buckets, "auto").weight_version == 3


def test_limits_grow_with_the_bytes() -> None:
    """By the minimum rate that docs/server.md names."""
    assert transport.seconds_for(120, 0) == 120
    assert transport.seconds_for(120, 140 * 10**9) == pytest.approx(120 + 2086, abs=1)
