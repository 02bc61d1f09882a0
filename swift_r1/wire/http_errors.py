"""HTTP errors: what the server raises to answer with one, and what the client raises when it gets one."""

from __future__ import annotations

from swift_r1.errors import RunFailed

NOT_NOW = 503


class HTTPError(Exception):
    """Answers the request with `status` and one plain sentence.

    Args:
        status: HTTP status; 4xx where the client is at fault, 503 for "not now".
        message: what is wrong and, where it helps, what to do.
        retry_after: seconds after which asking again makes sense.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


class Overloaded(HTTPError):
    """The server is healthy but has no room for the request now."""


class EngineDead(Exception):
    """The engine's process has ended; only a restart of the server helps."""


class ServerRefused(RunFailed):
    """The server answered with another `status` than 200; the message has its sentence.

    Attributes:
        retry_after: whole seconds, where the server named any.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
