"""HTTP errors: what the server raises to answer with one, and the client when it gets one."""

from __future__ import annotations

from swift_r1.errors import RunFailed

NOT_NOW = 503


class HTTPError(Exception):
    """Answers the request with `status` (4xx where the client is at fault, 503 for "not now") and one plain sentence;
    asking again makes sense after `retry_after` seconds."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


class Overloaded(HTTPError):
    """The server is healthy but has no room for the request now."""


class EngineDead(Exception):
    """The engine's process has ended; only a restart of the server helps."""


class ServerRefused(RunFailed):
    """The server answered with another `status` than 200; the message has its sentence."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
