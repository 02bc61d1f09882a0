"""Files of lines that grow."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.failures import FAILURES
from swift_r1.lab.runs.query import CompletionQuery
from swift_r1.record import lines
from swift_r1.record.lines import GrowingFile, json_rows, read_rows
from tests.lab.runs.made import completions, write_rows


def everything(file: GrowingFile, most: int) -> list[bytes]:
    found = []
    while data := file.read(most):
        found.append(data)
    return found


@pytest.mark.parametrize("most", [1, 3, 5, 100])
def test_lines_come_whole_and_once(tmp_path, most):
    path = tmp_path / "file"
    file = GrowingFile(path)
    assert (file.read(), file.half_written, file.fault) == (b"", False, None)
    path.write_bytes(b"aa\nbbbbbbbbbb\n\ncc")
    found = [file.read(most)]
    assert not file.half_written  # as far as it has been read
    found += everything(file, most)
    assert b"".join(found) == b"aa\nbbbbbbbbbb\n\n"
    assert all(data.endswith(b"\n") for data in found)
    assert file.half_written
    with path.open("ab") as more:
        more.write(b"c\n")
    assert (file.read(most), file.half_written, file.restarts) == (b"ccc\n", False, 0)


def test_lines_that_are_too_long_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_LINE", 64)
    path = tmp_path / "file"
    path.write_bytes(
        b'{"a": 1}\n' + b"\0" * 500 + b'\n{"a": 2}\n' + b"x" * 70 + b'\n{"a": 3}\n' + b"y" * 300
    )
    for most in (16, 100):
        file = GrowingFile(path)
        rows, damaged = json_rows(b"".join(everything(file, most)))
        assert [row["a"] for row in rows] == [1, 2, 3]
        assert damaged + file.too_long == 3
    assert read_rows(path) == (rows, ["file: 3 damaged lines are left out"])


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "file").mkdir()
    assert read_rows(tmp_path / "file") == ([], ["file cannot be read: Is a directory"])
    os.mkfifo(tmp_path / "pipe")
    assert read_rows(tmp_path / "pipe") == ([], ["pipe cannot be read: not a regular file"])


def test_several_threads_ask_while_it_grows(tmp_path):
    pytest.importorskip("duckdb")
    path = tmp_path / "completions.jsonl"
    rows = list(completions(40, 4, 4, 5))
    path.touch()
    asked = [
        lambda table: table.count(CompletionQuery(text="think", order_by="target")),
        lambda table: len(
            table.page(CompletionQuery(where=[("nums", "contains", "3")]), limit=10_000)
        ),
        lambda table: sum(row[kind] for row in table.failure_classes() for kind in FAILURES),
    ]
    with CompletionTable(path) as table, ThreadPoolExecutor(len(asked)) as pool:
        for start in range(0, len(rows), 64):
            found = [pool.submit(ask, table) for ask in asked]
            write_rows(path, rows[start : start + 64])
            table.refresh()
            assert all(start <= one.result(60) <= start + 64 for one in found)
        assert [ask(table) for ask in asked] == [len(rows)] * len(asked)
