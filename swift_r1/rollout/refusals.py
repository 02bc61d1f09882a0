"""The one way in which the server says no."""

from __future__ import annotations


class Refused(Exception):
    """A request that is answered with `status` and one plain sentence.

    Args:
        status: HTTP status, 4xx for the asker's fault, 503 for "not now".
        sentence: what is wrong and, where it helps, what to do.
        retry_after: seconds after which asking again makes sense (503 only).
    """

    def __init__(self, status: int, sentence: str, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.retry_after = retry_after


class EngineDead(Exception):
    """The engine's process has ended; nothing but a restart of the server helps."""
