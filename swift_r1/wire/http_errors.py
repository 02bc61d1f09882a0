"""The one way in which the server says no, and what the client makes of it."""

from __future__ import annotations

from swift_r1.errors import RunFailed

NOT_NOW = 503


class Refused(Exception):
    """A request that is answered with `status` and one plain sentence.

    Args:
        status: HTTP status, 4xx for the asker's fault, 503 for "not now".
        sentence: what is wrong and, where it helps, what to do.
        retry_after: seconds after which asking again makes sense.
    """

    def __init__(self, status: int, sentence: str, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.retry_after = retry_after


class Full(Refused):
    """The server serves, and has no room now: nothing is wrong with it."""


class EngineDead(Exception):
    """The engine's process has ended; nothing but a restart of the server helps."""


class ServerRefused(RunFailed):
    """The server answered with another `status` than 200; the message has its sentence.

    Attributes:
        retry_after: whole seconds, where the server named any.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
