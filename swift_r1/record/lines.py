"""Files of JSON lines that another process appends to, cuts at a resume, or replaces."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swift_r1.errors import one_line
from swift_r1.runtime.files import regular

CHUNK = 16 << 20  # bytes of one read
# bytes; a longer line is damage, such as the zeros that a crashed file system leaves
LONGEST_LINE = 16 << 20
_PIECE = 1 << 20  # bytes that are turned into objects at once, which take many times their room
# bytes before the place reached, by which a file that was cut and has grown again is known
_TAIL = 64


class GrowingFile:
    """The whole lines of `path`, each once, as they come. What follows the last newline waits for the next call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0  # how often the file was cut or replaced, so that reading began again
        self.fault: str | None = None  # why it cannot be read; None also where there is no file
        self._begin()

    def _begin(self) -> None:
        self.offset = 0  # bytes read
        self.too_long = 0  # lines that were left out, being longer than `LONGEST_LINE`
        self.half_written = False  # whether the file ended in the middle of a line
        self._tail = b""
        self._file = (0, 0)
        self._skipping = False

    def read(self, most: int = CHUNK) -> bytes:
        """Returns the next whole lines, about `most` bytes of them; empty where there are no more yet. Where `restarts`
        has changed, all that was read before is void."""
        try:
            with open(self.path, "rb", buffering=0, opener=regular) as file:
                return self._read(file.fileno(), most)
        except FileNotFoundError:
            self.fault = None
            self._restart()
        except OSError as error:
            self.fault = f"{self.path.name} cannot be read: {error.strerror or one_line(error)}"
        return b""

    def _read(self, file: int, most: int) -> bytes:
        self.fault = None
        state = os.fstat(file)
        if not self.is_same(file):
            self._restart()
        self._file = (state.st_dev, state.st_ino)
        self.half_written = False
        while self.offset < state.st_size:
            data = os.pread(file, most, self.offset)
            end = data.rfind(b"\n") + 1
            if not end and len(data) < min(most, LONGEST_LINE):
                self.half_written = True
                return b""
            if not end and len(data) < LONGEST_LINE:
                most = min(2 * most, LONGEST_LINE)
                continue
            self._advance(data[:end] if end else data)
            lines = data[data.index(b"\n") + 1 : end] if self._skipping and end else data[:end]
            if not end and not self._skipping:
                self.too_long += 1
            self._skipping = not end
            if lines:
                return lines
        return b""

    def is_same(self, file: int) -> bool:
        """Returns whether this open file still has what was read of it."""
        state = os.fstat(file)
        same = (state.st_dev, state.st_ino) == self._file
        return same and os.pread(file, len(self._tail), self.offset - len(self._tail)) == self._tail

    def _advance(self, data: bytes) -> None:
        self.offset += len(data)
        self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]

    def _restart(self) -> None:
        if self.offset:
            self.restarts += 1
        self._begin()


def json_rows(lines: bytes) -> tuple[list[dict[str, Any]], int]:
    """Returns the objects of whole lines, and how many lines are none."""
    found = [_json_row(line) for line in lines.splitlines()]
    rows = [row for row in found if row is not None]
    return rows, len(found) - len(rows)


def _json_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class JsonRows:
    """The objects of a growing file, each once, as they come."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._taken = self._damaged = self._restarts = 0

    def refresh(self, take: Callable[[dict[str, Any]], bool], forget: Callable[[], None]) -> bool:
        """Reads what has been written since; whether there was anything. A half-written line waits. `take` gets the
        objects and says whether it can use them; `forget` is called where all that was taken is void."""
        before = self.state
        while True:
            data = self._file.read(_PIECE)
            if self._file.restarts != self._restarts:
                forget()
                self._taken = 0
                self._damaged = 0
                self._restarts = self._file.restarts
            if not data:
                return before != self.state
            for line in data.splitlines():
                taken = (row := _json_row(line)) is not None and take(row)
                self._taken += taken
                self._damaged += not taken

    @property
    def state(self) -> tuple[int, int]:
        """Returns a value that changes when there is something new; who shares the file knows by it what others have
        read."""
        return self._taken, self._restarts

    @property
    def problems(self) -> list[str]:
        """Returns what could not be read, a line each."""
        return line_problems(self._file, self._damaged)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns all objects of a file now, and what is wrong with it, a line each. For files that fit in memory."""
    found: list[dict[str, Any]] = []

    def take(row: dict[str, Any]) -> bool:
        found.append(row)
        return True

    rows = JsonRows(path)
    rows.refresh(take, found.clear)
    return found, rows.problems


def line_problems(file: GrowingFile, damaged: int) -> list[str]:
    """Returns what to say of a file of which so many lines were no objects."""
    problems = [file.fault] if file.fault else []
    if damaged or file.too_long:
        count = damaged + file.too_long
        problems.append(
            f"{file.path.name}: {count} damaged line{'s are' if count > 1 else ' is'} left out"
        )
    if file.half_written:
        problems.append(f"{file.path.name}: the last line is half-written, and left out")
    return problems
