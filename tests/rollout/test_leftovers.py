"""Staging folders of servers that are gone are removed, those of living ones never."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from swift_r1.rollout.weights import staging
from swift_r1.rollout.weights.staging import Staging, remove_leftovers


def test_only_what_no_server_holds_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_new_folder_is_not_taken_for_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
