"""Servers that come and go: what a file says of them is followed while a run goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from swift_r1.rollout.pool.pool import ServerPool
from swift_r1.rollout.pool.session import ServerSession
from swift_r1.wire.server_file import parsed

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_CLOSE_S = 10.0


class Membership:
    """Has a pool follow a file (`wire/server_file.py`), from now on until `close`.

    What the file says counts once it was the same in two looks, half a second apart: it may be half-written. While it
    cannot be read the servers stay. A line that is no URL is left out.

    Args:
        make: makes the session with a newcomer, see `ServerPool.follow`.
    """

    def __init__(self, path: Path, pool: ServerPool, make: Callable[[str], ServerSession]) -> None:
        self._path = path
        self._pool = pool
        self._make = make
        self._seen: bytes | OSError | None = None
        self._followed: bytes | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            try:
                self._look()
            except Exception:  # such as too many open files
                logger.exception("%s is not followed until it changes again", self._path)

    def _look(self) -> None:
        try:
            seen = self._path.read_bytes()
        except OSError as error:
            if not isinstance(self._seen, OSError):
                why = error.strerror or error
                logger.warning("%s cannot be read (%s): the rollout servers stay as they are", self._path, why)
            self._seen = error
            return
        before = self._seen
        self._seen = seen
        if seen != before or seen == self._followed:
            return
        self._followed = seen
        servers = parsed(seen.decode(errors="replace"), str(self._path))
        for fault in servers.faults:
            logger.warning("%s: left out", fault)
        self._pool.follow(servers.urls, self._make)
