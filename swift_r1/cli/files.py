"""What errors of files that commands write become."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from swift_r1.errors import UsageError


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Raises UsageError, which begins with `what`, where the block raises OSError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror or error}") from error
