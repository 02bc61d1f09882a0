"""Files that others have named: regular ones alone are opened, and as much of them as there is room for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from swift_r1.runtime.files import read_bytes, read_text, regular


def test_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("größer")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_text(tmp_path / "link") == "größer"
    assert read_bytes(tmp_path / "file", 8) == "größer".encode()
    with pytest.raises(OSError, match="has more than 0 MiB"):
        read_bytes(tmp_path / "file", 7)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        read_bytes(tmp_path)


def test_nothing_else_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    before = len(os.listdir("/proc/self/fd"))
    for name in ("pipe", "link", "socket", "/dev/zero", "/dev/tty"):
        with pytest.raises(OSError) as caught, open(tmp_path / name, opener=regular):
            pass
        assert caught.value.strerror == "not a regular file"
    assert len(os.listdir("/proc/self/fd")) == before
    listener.close()


def test_a_file_without_an_end_is_read_as_far_as_there_is_room() -> None:
    """Regular by its mode, and empty by its size."""
    with pytest.raises(OSError, match="has more than 0 MiB"):
        read_bytes("/proc/self/maps", 10)
