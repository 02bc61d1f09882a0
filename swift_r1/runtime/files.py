"""Files that someone else has named or put there, in rows and in folders of runs, models and tasks: a pipe or a device in
their place would stop its reader, or fill the memory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_TEXT = 256 << 20  # bytes


def regular(path: str | Path, flags: int) -> int:
    """Opens a regular file, as an `opener` of `open`. Raises OSError: it is none, or cannot be opened."""
    _check(os.stat(path).st_mode)  # opening some devices is an order to them
    number = os.open(path, flags | os.O_NONBLOCK)
    try:
        _check(os.fstat(number).st_mode)
    except OSError:
        os.close(number)
        raise
    return number


def _check(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")


def read_bytes(path: str | Path, most: int = MOST_TEXT) -> bytes:
    """Returns the content of a regular file. Raises OSError: it is none, cannot be read, or has more than `most`
    bytes."""
    with open(path, "rb", opener=regular) as file:
        content = file.read(most + 1) or b""  # None: /proc has regular files that wait
    if len(content) > most:
        raise OSError(errno.EFBIG, f"has more than {most >> 20} MiB")
    return content


def read_text(path: str | Path, errors: str = "strict") -> str:
    """Returns the content of a regular file of UTF-8. Raises as `read_bytes`, and UnicodeDecodeError."""
    return read_bytes(path).decode(errors=errors)
