"""Reading local data files row by row; a line that cannot be read is a fault of that row, not of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_r1.data.syntax import FILE_SUFFIXES
from swift_r1.errors import UsageError


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as the source has it. `where` is for people (`file:line`); `fault` says why `row` could not be read;
    `subset` is the loader's subset that it came from."""

    index: int
    where: str
    row: dict[str, Any]
    fault: str | None = None
    subset: str | None = None


def read_file(path: str | Path) -> Iterator[RawRow]:
    """The rows of a jsonl, json, csv or parquet file, in order.

    Raises:
        UsageError: the file is missing, not readable as what its name says, or of another kind.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"data file not found: {path}")
    readers = dict(zip(FILE_SUFFIXES, (_read_jsonl, _read_json, _read_csv, _read_parquet), strict=True))
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path}: cannot read {path.suffix or 'this'} files, only {', '.join(FILE_SUFFIXES)}")
    try:
        yield from reader(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    index = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            yield _json_row(index, f"{path}:{number}", line.rstrip())
            index += 1


def _json_row(index: int, where: str, line: bytes) -> RawRow:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return RawRow(index, where, {}, f"not UTF-8 at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return RawRow(index, where, {}, f"not JSON: {error.msg} at column {error.colno}")
    except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        return RawRow(index, where, {}, f"not JSON that can be read: {_one_line(error)}")
    return _checked(index, where, row)


def _checked(index: int, where: str, row: Any) -> RawRow:
    if not isinstance(row, dict):
        return RawRow(index, where, {}, f"a row is an object of columns, this is a {type(row).__name__}")
    return RawRow(index, where, row)


def _read_json(path: Path) -> Iterator[RawRow]:
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines under the name of .json are common
            yield from _read_jsonl(path)
            return
        raise UsageError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise UsageError(f"{path}: not JSON that can be read: {_one_line(error)}") from error
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list):
        raise UsageError(f"{path}: holds a {type(rows).__name__}, not a list of rows")
    for index, row in enumerate(rows):
        yield _checked(index, f"{path} row {index + 1}", row)


def _read_csv(path: Path) -> Iterator[RawRow]:
    from pyarrow import ArrowInvalid, csv  # types of columns are inferred, as datasets does

    try:
        table = csv.read_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True))
    except ArrowInvalid as error:
        raise UsageError(f"{path}: not a CSV table: {_one_line(error)}") from error
    yield from _table_rows(path, table.to_batches())


def _read_parquet(path: Path) -> Iterator[RawRow]:
    from pyarrow import ArrowInvalid, parquet

    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise UsageError(f"{path}: not a parquet file: {_one_line(error)}") from error
    with file:
        yield from _table_rows(path, file.iter_batches())


def _table_rows(path: Path, batches: Any) -> Iterator[RawRow]:
    index = 0
    for batch in batches:
        for row in batch.to_pylist():
            yield RawRow(index, f"{path} row {index + 1}", row)
            index += 1


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
