"""Requests that come one by one while earlier ones are answered."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from swift_r1.wire.protocol import RolloutOutput, RolloutRequest


class OpenCalls:
    """Takes requests until it is closed, and each one's answer; what was not answered by then is dropped. Thread-safe.

    Args:
        on_answer: called with each answer, in the thread that asks.
        look: called there again and again.
    """

    def __init__(self, on_answer: Callable[[RolloutOutput], None], look: Callable[[], None] = lambda: None) -> None:
        self._on_answer = on_answer
        self.look = look
        self._lock = threading.Lock()
        self._open: dict[str, RolloutRequest] = {}  # by the name that it is asked under
        self._new: deque[RolloutRequest] = deque()
        self._wake: Callable[[], object] | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, request: RolloutRequest) -> None:
        with self._lock:
            self._open[request.request_id] = request
            self._new.append(request)
            self._notify()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._notify()

    def begin(self, wake: Callable[[], object]) -> None:
        """Somebody begins to answer: all that is open is to be taken (again); `wake` is called when more has come."""
        with self._lock:
            self._new = deque(self._open.values())
            self._wake = wake

    def end(self) -> None:
        """Nobody answers any more."""
        with self._lock:
            self._wake = None

    def take(self) -> list[RolloutRequest]:
        """Returns the requests that have come since."""
        with self._lock:
            taken = list(self._new)
            self._new.clear()
            return taken

    def answered(self, output: RolloutOutput) -> None:
        with self._lock:
            request = self._open.pop(output.request_id)
        self._on_answer(output.model_copy(update={"request_id": _plain(request.request_id)}))

    def again(self, name: str, times: int) -> None:
        """The answer to `name` is no good. Asked again under the same name, a server would give it again, from its
        cache."""
        with self._lock:
            request = self._open.pop(name)
        self.put(request.model_copy(update={"request_id": f"{_plain(name)}~{times}"}))

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake()


def _plain(name: str) -> str:
    return name.partition("~")[0]
