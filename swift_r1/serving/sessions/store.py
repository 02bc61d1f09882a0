"""The sessions of a server: bounded in number and memory, and gone when nobody has used them for long."""

from __future__ import annotations

import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from swift_r1.serving.sessions.session import SessionState
from swift_r1.wire import sessions as wire
from swift_r1.wire.protocol import HTTPError

_REMEMBERED = 16_384  # ids of sessions that have expired
_BYTES_PER_SESSION = 4000
_FULL_S = 10  # after so many seconds at most a full server may be asked again


class SessionStore:
    """Keeps at most `most` sessions, whose records are at most `most_bytes`. A session expires after `timeout` seconds
    without a call; while one runs it does not."""

    def __init__(
        self,
        most: int,
        most_bytes: int,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self.timeout = timeout
        self._clock = clock
        # the one that was asked for last at the end
        self._sessions: OrderedDict[str, SessionState] = OrderedDict()
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._keys: OrderedDict[str, str] = OrderedDict()  # of sessions that are gone
        self.bytes = 0  # of all records

    def __len__(self) -> int:
        self._expire()
        return len(self._sessions)

    def open(self, request: wire.SessionRequest) -> SessionState:
        """The session of this id, a new one where there is none. Raises HTTPError: 409 where it was opened with another
        body, 503 where there is no room."""
        self._expire()
        name = request.id or f"session-{secrets.token_hex(12)}"
        body = request.model_copy(update={"id": None})
        known = self._sessions.get(name)
        if known is not None:
            if known.request != body:
                raise HTTPError(409, f"session {name!r} was opened with another body")
            return self.get(name)
        if len(self._sessions) >= self.most:
            self._refuse(f"there are {self.most} sessions already (--max_sessions)")
        self.check_memory()
        key = f"{wire.SESSION_KEY}{secrets.token_urlsafe(24)}"
        self._sessions[name] = session = SessionState(name, body, key, self._clock)
        session.on_growth = self._grow
        self._grow(_BYTES_PER_SESSION)
        self._expired.pop(name, None)
        return session

    def get(self, name: str) -> SessionState:
        """Raises HTTPError: 410 for a session that has expired, 404 for another that is not there."""
        self._expire()
        session = self._sessions.get(name)
        if session is None:
            if name in self._expired:
                raise HTTPError(
                    410, f"session {name!r} has expired: nothing used it for {self.timeout:g} s"
                )
            raise HTTPError(
                404, f"there is no session {name[:200]!r}: open it with POST /v1/sessions"
            )
        session.used = self._clock()
        self._sessions.move_to_end(name)
        return session

    def key_of(self, name: str) -> str:
        """Returns the key of a session that is here or was; empty for others. That is no use of the session."""
        session = self._sessions.get(name)
        return self._keys.get(name, "") if session is None else session.key

    def delete(self, name: str) -> SessionState:
        """Forgets it; the caller ends what runs. Raises as `get`."""
        session = self.get(name)
        self._forget(session)
        return session

    def _grow(self, size: int) -> None:
        self.bytes += size

    def _forget(self, session: SessionState) -> None:
        del self._sessions[session.name]
        session.on_growth = lambda _bytes: None
        self._keys[session.name] = session.key
        if len(self._keys) > _REMEMBERED:
            self._keys.popitem(last=False)
        self._grow(-session.bytes - _BYTES_PER_SESSION)

    def check_memory(self) -> None:
        """Raises HTTPError (503) where the records leave no room for more."""
        if self.bytes + _BYTES_PER_SESSION > self.most_bytes:
            self._refuse(
                "the sessions' records are as large as they may be (--session_memory): delete some"
            )

    def _refuse(self, why: str) -> None:
        oldest = next(iter(self._sessions.values()), None)
        ends = self.timeout if oldest is None else oldest.used + self.timeout - self._clock()
        raise HTTPError(503, why, max(1, min(_FULL_S, math.ceil(ends))))

    def _expire(self) -> None:
        """A session at the front that runs moves to the end: its last call was used when it ended."""
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if self._clock() - session.used <= self.timeout:
                return
            if session.running:
                session.used = self._clock()
                self._sessions.move_to_end(name)
                continue
            self._forget(session)
            self._expired[name] = None
            if len(self._expired) > _REMEMBERED:
                self._expired.popitem(last=False)
