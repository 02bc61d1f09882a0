"""Reading local data files row by row; a line that cannot be read is a fault of that row, which names its file and line.
`datasets.load_dataset` would end the run."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from swift_r1.errors import UsageError, a_kind, one_line
from swift_r1.runtime.files import regular

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch, Table

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
MAX_LINE = 32 << 20  # bytes; a longer line is a damaged file, and would fill the memory
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
}
_NUL = "holds NUL bytes: the file is damaged, or not UTF-8 text"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as the source has it. `where` is for people (`file:line`); `fault` says why `row` could not be read;
    `subset` is the loader's subset that it came from."""

    index: int
    where: str
    row: dict[str, Any]
    fault: str | None = None
    subset: str | None = None


class ProcessShare(NamedTuple):
    """A process's part of the rows of a source: contiguous, so that the parts of all processes are the rows in order."""

    number: int = 0
    of: int = 1

    def places(self, count: int) -> range:
        """Returns its places among `count`."""
        return range(count * self.number // self.of, count * (self.number + 1) // self.of)

    def of_batch(self, count: int, first: int, size: int) -> range:
        """Returns which of `size` rows are in it, counted from the first of them, which is at `first` among `count`."""
        own = self.places(count)
        return range(min(max(own.start - first, 0), size), min(max(own.stop - first, 0), size))


WHOLE = ProcessShare()
IN_PARTS = (".jsonl", ".txt", ".parquet")
"""Kinds of files of which several processes read a share each."""


def read_file(path: str | Path, share: ProcessShare = WHOLE) -> Iterator[RawRow]:
    """Yields the rows of a jsonl, json, csv, parquet or txt file, in order; a share of those `IN_PARTS`.

    Raises:
        UsageError: the file is missing, not readable as what its name says, compressed, or of another kind.
    """
    path = Path(path)
    check_file(path)
    kind = path.suffix.lower()
    try:
        if kind == ".json":
            yield from _read_json(path)
        elif kind == ".csv":
            yield from _read_csv(path)
        elif kind == ".parquet":
            yield from _read_parquet(path, share)
        else:
            yield from _read_lines(path, share)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror or one_line(error, 200)}"
        ) from error


def check_file(path: Path) -> None:
    """Looks at the name and the first bytes; raises UsageError as `read_file`, as far as these show it."""
    if not path.exists():
        raise UsageError(f"data file not found: {path}")
    suffix = path.suffix.lower()
    try:
        with open(path, "rb", opener=regular) as file:
            head = file.read(8)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    kind = next((kind for magic, kind in _COMPRESSED.items() if head.startswith(magic)), None)
    if kind is not None:
        raise UsageError(f"{path}: is compressed ({kind}): unpack it first")
    if suffix not in FILE_SUFFIXES:
        raise UsageError(
            f"{path}: cannot read {suffix or 'such'} files, only {', '.join(FILE_SUFFIXES)}"
        )
    if suffix != ".parquet" and head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{path}:1: is UTF-16 or UTF-32 text: convert it to UTF-8")


def _read_lines(path: Path, share: ProcessShare = WHOLE) -> Iterator[RawRow]:
    """Yields the rows of lines that begin in a share of the file's bytes. Lines without text are not rows."""
    parse = _text if path.suffix.lower() == ".txt" else _parse
    index = 0
    with open(path, "rb", opener=regular) as file:
        own = share.places(os.fstat(file.fileno()).st_size)
        for number, start, line in _lines(file):
            if start >= own.stop:
                return
            if start in own:
                yield RawRow(index, f"{path}:{number}", *_row_of(line, parse))
            index += 1


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
    """Yields the number and the first byte of each line with text, and the line; None for one that is too long."""
    number = 0
    start = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        size = len(line)
        whole = line if size <= MAX_LINE else None
        while whole is None and not line.endswith(b"\n") and (line := file.readline(MAX_LINE)):
            size += len(line)
        if whole is None or whole.strip():
            yield number, start, whole
        start += size


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _value in pairs]
        raise ValueError(
            f"{next(name for name in names if names.count(name) > 1)!r} is there twice in one object"
        )
    return found


def _text(line: str) -> dict[str, Any]:
    return {"text": line}


_parse = json.JSONDecoder(object_pairs_hook=_object).decode


def _row_of(line: bytes | None, parse: Callable[[str], Any]) -> tuple[dict[str, Any], str | None]:
    """Returns the row of a line, or why there is none."""
    if line is None:
        return {}, f"the line is longer than {MAX_LINE >> 20} MiB"
    try:
        return _checked(parse(line.rstrip().decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        fault = f"not UTF-8 at byte {error.start} of the line"
    except json.JSONDecodeError as error:
        fault = _NUL if b"\0" in line else f"not JSON: {error.msg} at column {error.colno}"
    except (RecursionError, ValueError) as error:
        # ValueError: a doubled column, a number of thousands of digits
        fault = f"not JSON that can be read: {one_line(error, 200)}"
    return {}, fault


def _checked(row: Any) -> tuple[dict[str, Any], str | None]:
    if not isinstance(row, dict):
        return {}, f"a row is an object of columns, this is {a_kind(row)}"
    return row, None


def _read_json(path: Path) -> Iterator[RawRow]:
    content = _whole_text(path)
    if not content.strip():
        return
    try:
        rows = _parse(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines in a file named .json are common
            yield from _read_lines(path)
            return
        cause = _NUL if "\0" in content else error.msg
        raise UsageError(f"{path}:{error.lineno}: not JSON: {cause}") from error
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{path}: not JSON that can be read: {one_line(error, 200)}") from error
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list):
        raise UsageError(f"{path}:1: holds {a_kind(rows)}, not a list of rows")
    for index, row in enumerate(rows):
        yield RawRow(index, f"{path} row {index + 1}", *_checked(row))


def _whole_text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not UTF-8 at byte {error.start}") from error


def _read_csv(path: Path) -> Iterator[RawRow]:
    """Yields the rows of a table. Its cells have no types: a column is of numbers where Python would write each of them
    as it stands there, else of text as it stands there, so that nothing is lost. An empty cell is None."""
    text = _whole_text(path)
    cells = _cells(path, text)
    _line, names = next(cells, (1, []))
    if not names:
        raise UsageError(f"{path}:1: not a CSV table: Empty CSV file")
    _refuse_doubled(f"{path}:1", names)
    of_text = {
        name
        for _line, values in cells
        if len(values) == len(names)
        for name, value in zip(names, values, strict=True)
        if value and _number(value) is None
    }
    for index, (line, values) in enumerate(islice(_cells(path, text), 1, None)):
        fault = None
        row: dict[str, Any] = {}
        if len(values) == len(names):
            for name, value in zip(names, values, strict=True):
                row[name] = (value or None) if name in of_text else _number(value)
        else:
            fault = f"has {len(values)} values for {len(names)} columns"
        yield RawRow(index, f"{path}:{line}", row, fault)


def _cells(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the cells of each row that is not blank, with the line where it begins."""
    csv.field_size_limit(MAX_LINE)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        for cells in reader:
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(f"{path}:{line}: not a CSV table: {one_line(error, 200)}") from error


def _number(text: str) -> int | float | None:
    """Returns a number that is written as Python writes it; None for other text, such as 007, 1e5, 1.50 and nan."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:  # also for thousands of digits
            continue
        if str(value) == text and isfinite(value):
            return value
    return None


def _refuse_doubled(where: Path | str, names: list[str]) -> None:
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        raise UsageError(f"{where}: the column {doubled[0]!r} is there twice")


def arrow_rows(batch: RecordBatch | Table) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yields the rows of Arrow as they were written, and why there are none: text that is not UTF-8, a time out of
    range."""
    try:
        yield from ((row, None) for row in _written(batch))
    except (ValueError, OverflowError, KeyError):  # of some row; KeyError: a map with a key twice
        for place in range(batch.num_rows):
            try:
                yield _written(batch.slice(place, 1))[0], None
            except (ValueError, OverflowError, KeyError) as error:
                yield {}, f"holds a value that cannot be read: {one_line(error, 200)}"


def _written(batch: RecordBatch | Table) -> list[dict[str, Any]]:
    from pyarrow import types

    nested = [
        field for field in batch.schema if types.is_nested(field.type) or _is_json(field.type)
    ]
    rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    for row in rows:
        row |= {field.name: _value(row[field.name], field.type) for field in nested}
    return rows


def _is_json(kind: DataType) -> bool:
    return getattr(kind, "extension_name", "") == "arrow.json"


def _value(value: Any, kind: DataType) -> Any:
    """Returns a value without the keys that Arrow gave its objects because others of the column have them, which are
    null. A null that was written under a key is not told from these; those in lists, maps and JSON are kept."""
    from pyarrow import types

    if value is None:
        return None
    if _is_json(kind):
        return json.loads(value)
    if types.is_struct(kind):
        return {
            field.name: _value(value[field.name], field.type)
            for field in kind
            if value[field.name] is not None
        }
    if types.is_map(kind):
        return {key: _value(one, kind.item_type) for key, one in value.items()}
    return [_value(one, kind.value_type) for one in value] if isinstance(value, list) else value


def _read_parquet(path: Path, share: ProcessShare) -> Iterator[RawRow]:
    from pyarrow import ArrowInvalid, parquet

    index = 0
    try:
        with parquet.ParquetFile(path) as file:
            _refuse_doubled(path, file.schema_arrow.names)
            count = file.metadata.num_rows
            for batch in file.iter_batches():
                own = share.of_batch(count, index, batch.num_rows)
                rows = arrow_rows(batch.slice(own.start, len(own)))
                for place, (row, fault) in enumerate(rows, start=index + own.start):
                    yield RawRow(place, f"{path} row {place + 1}", row, fault)
                index += batch.num_rows
    except (ArrowInvalid, OSError) as error:
        raise UsageError(
            f"{path}: not a whole parquet file (read to row {index}): {one_line(error, 200)}"
        ) from error
