"""Staging folders of servers that are gone are removed, those of living ones never."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
from pathlib import Path

import psutil
import pytest

from swift_r1.sync import staging
from swift_r1.sync.staging import Staging, remove_leftovers
from tests.conftest import until


def test_only_what_no_server_holds_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(staging.tempfile, "gettempdir", lambda: str(tmp_path))
    living = Staging(1)
    killed = tmp_path / f"{living.folder.name}-killed"
    killed.mkdir()
    (killed / "bucket-000001.safetensors").write_bytes(b"x")
    try:
        remove_leftovers()
        assert living.folder.is_dir() and not killed.exists()
    finally:
        living.close()


def test_marks_of_processes_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(staging.tempfile, "gettempdir", lambda: str(tmp_path))
    ended, living = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "60"])
    try:
        marks = [
            tmp_path / f"__KMP_REGISTERED_LIB_{one.pid}_{os.getuid()}" for one in (ended, living)
        ]
        for mark in marks:
            mark.touch()
        until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
        remove_leftovers()
        assert [mark.exists() for mark in marks] == [False, True]
    finally:
        living.kill()
        for one in (ended, living):
            one.wait(10)


def test_a_new_folder_is_not_taken_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(staging.tempfile, "gettempdir", lambda: str(tmp_path))
    enough = threading.Event()

    def start_other_servers() -> None:
        while not enough.is_set():
            remove_leftovers()

    others = [threading.Thread(target=start_other_servers) for _ in range(2)]
    for one in others:
        one.start()
    try:
        for _ in range(300):
            own = Staging(1)
            assert own.folder.is_dir()
            own.close()
    finally:
        enough.set()
        for one in others:
            one.join()


def test_segments_of_vllms_workers_go_once_nobody_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(staging.tempfile, "gettempdir", lambda: str(tmp_path))
    used, new, left = (
        tmp_path / f"vllm_dist_{name}-tp:0-[0-1]-cpushm_0" for name in ("used", "new", "left")
    )
    for segment in (used, new, left):
        segment.write_bytes(bytes(4096))
    for segment in (used, left):
        os.utime(segment, (0, 0))
    with used.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        remove_leftovers()
        assert used.exists() and new.exists() and not left.exists()
    remove_leftovers()
    assert new.exists() and not used.exists()
