"""The snapshot of the weights in shared memory: servers get links to it, and what one of them reads does not change."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swift_r1.sync.snapshot import SharedFile, SnapshotBucket, WeightSnapshot
from tests.live_servers import to_bytes


def bucket(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((1000,), float(version)))]


def written(snapshot: WeightSnapshot, version: int, compare: bool = False) -> SnapshotBucket:
    snapshot.begin(version, None, compare, shared=True)
    snapshot.add(bucket(version))
    snapshot.end(whole=True)
    found = snapshot.bucket(version, 0, copy=False)
    assert found is not None and b"".join(found.parts()) == to_bytes(bucket(version))
    return found


@pytest.fixture
def folders() -> Iterator[list[Path]]:
    """Of two servers."""
    made = [Path(tempfile.mkdtemp(dir="/dev/shm")) for _ in range(2)]
    yield made
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


def test_servers_share_its_pages_and_none_changes_what_another_reads(folders: list[Path]) -> None:
    snapshot = WeightSnapshot()
    first = written(snapshot, 1)
    places = [folder / "incoming-000000" for folder in folders]
    assert all(first.link(place) for place in places)
    assert os.path.samefile(*places) and places[0].read_bytes() == to_bytes(bucket(1))
    # Nobody reads it any more: the next version has the same pages.
    second = written(snapshot, 2)
    assert second.data is first.data and second.link(places[0])
    # One has it in use: it keeps what it has.
    taken = places[0].rename(folders[0] / "bucket-000001.safetensors")
    third = written(snapshot, 3)
    assert third.data is not second.data and taken.read_bytes() == to_bytes(bucket(2))
    assert third.link(places[1])


def test_a_server_that_comes_back_is_given_the_pages_of_one_that_is_gone(
    folders: list[Path],
) -> None:
    snapshot = WeightSnapshot()
    kept = written(snapshot, 1)
    assert kept.link(folders[0] / "incoming-000000")
    shutil.rmtree(folders[0])
    again = snapshot.bucket(1, 0, copy=True)
    place = folders[1] / "incoming-000000"
    assert again is not None and again.digest == kept.digest and again.link(place)
    # It reads at its own time: the next version is written elsewhere.
    newer = written(snapshot, 2)
    assert newer.data is not again.data and place.read_bytes() == to_bytes(bucket(1))


def test_it_is_in_own_memory_where_shared_memory_is_short_and_where_versions_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot = WeightSnapshot()
    assert isinstance(written(snapshot, 1).data, SharedFile)
    assert not isinstance(written(snapshot, 2, compare=True).data, SharedFile)
    assert written(snapshot, 3, compare=True).change is not None
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: shutil._ntuple_diskusage(100, 0, 100))
    assert not isinstance(written(WeightSnapshot(), 1).data, SharedFile)


@pytest.mark.long
def test_a_weight_over_2_gib_is_read_whole() -> None:
    """One `read` of Linux ends at 2,147,479,552 bytes. The file is a hole, the copy is 2 GiB of memory."""
    size = (2 << 30) + 5
    file = SharedFile()
    os.pwrite(file._descriptor, b"end", size - 3)
    data = file.read(size)
    assert len(data) == size and data.endswith(b"\0end")
