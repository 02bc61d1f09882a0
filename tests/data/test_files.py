"""Local files of each kind, and what is wrong with broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift_r1.data.files import read_file
from swift_r1.errors import UsageError

ROWS = [{"question": "1 + 1?", "answer": 2}, {"question": 'größer,\n"als"', "answer": 3}]


def written(path: Path, kind: str) -> Path:
    file = path / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text(
            "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n",
            encoding="utf-8",
        )
    elif kind == "json":
        file.write_text(json.dumps(ROWS), encoding="utf-8")
    elif kind == "csv":
        file.write_text('question,answer\n1 + 1?,2\n"größer,\n""als""",3\n', encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_kinds(tmp_path: Path, kind: str) -> None:
    raws = list(read_file(written(tmp_path, kind)))
    assert [raw.row for raw in raws] == ROWS
    assert [raw.index for raw in raws] == [0, 1]
    assert all(raw.fault is None for raw in raws)


def test_jsonl_under_the_name_of_json(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('{"a": 1}\n{"a": 2}\n')
    assert [raw.row for raw in read_file(file)] == [{"a": 1}, {"a": 2}]


def test_bad_lines_are_faults_of_their_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"a": 1}\n{"a": \n\xff\xfe\n[1]\n'
        + b"[" * 100_000
        + b"\n"
        + b"1" * 5_000
        + b'\n{"a": 2}\n'
    )
    raws = list(read_file(file))
    assert [raw.row for raw in raws] == [{"a": 1}, {}, {}, {}, {}, {}, {"a": 2}]
    faults = [raw.fault for raw in raws]
    assert faults[0] is None and faults[6] is None
    assert "not JSON: Expecting value at column" in str(faults[1])
    assert "not UTF-8" in str(faults[2])
    assert "this is a list" in str(faults[3])
    assert "recursion" in str(faults[4])
    assert "digits" in str(faults[5])
    assert raws[1].where == f"{file}:2"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b'[{"a": 1},\n', r"x\.json:2: not JSON"),
        ("x.json", b"3", "holds an int, not a list of rows"),
        ("x.json", b"\xff", "not UTF-8 at byte 0"),
        ("x.csv", b"", "not a CSV table"),
        ("x.parquet", b"PAR1 not", "not a whole parquet file"),
        ("x.parquet", b"", "not a whole parquet file"),
        ("x.xlsx", b"", "cannot read .xlsx files"),
    ],
)
def test_unreadable_files_give_one_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        list(read_file(file))
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not found"):
        list(read_file(tmp_path / "x.jsonl"))
