"""Local files of each kind, and what is wrong with broken ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift_r1.data.files import read_file
from swift_r1.data.hubs import SetLocation, load_split, split_rows
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
    file.write_text('\ufeff{"a": 1}\n{"a": 2}\n')
    assert [raw.row for raw in read_file(file)] == [{"a": 1}, {"a": 2}]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not found"):
        list(read_file(tmp_path / "x.jsonl"))


def test_cells_of_a_csv_file_are_what_is_written_there(tmp_path: Path) -> None:
    """Columns of numbers are those whose numbers would be written the same way again; nothing else is guessed."""
    columns = {
        "time": ["12:30", "01:05"],
        "date": ["2024-01-05", "2024-05-01"],
        "zeros": ["007", "1"],
        "scientific": ["1e5", "2"],
        "digits": ["1.50", "2"],
        "nan": ["NaN", "1.5"],
        "inf": ["inf", "1"],
        "none": ["None", "null"],
        "yes": ["yes", "no"],
        "true": ["true", "false"],
        "huge": ["123456789012345678901234567890", "-5"],
        "float": ["0.5", "3"],
        "gaps": ["", "3"],
        "text": ["", "x"],
        "empty": ["", ""],
        "signs": ["+5", " 5"],
        "separated": ["1_000", "5"],
        "lines": ["a\u2028b", "c\r\nd"],
    }
    file = tmp_path / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows([columns, *zip(*columns.values(), strict=True)])
    first, second = (raw.row for raw in read_file(file))
    numbers = {
        "huge": [123456789012345678901234567890, -5],
        "float": [0.5, 3],
        "gaps": [None, 3],
        "text": [None, "x"],
        "empty": [None, None],
    }
    wanted = {**columns, **numbers}
    assert {name: [first[name], second[name]] for name in columns} == wanted
    assert type(second["float"]) is int


def test_a_row_of_another_length_says_nothing_of_its_columns(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('a,b\n\n"1\n",2\nx,y,z\n3,4\n')
    rows = [(raw.row, raw.where, bool(raw.fault)) for raw in read_file(file)]
    assert rows == [
        ({"a": "1\n", "b": 2}, f"{file}:3", False),
        ({}, f"{file}:5", True),
        ({"a": "3", "b": 4}, f"{file}:6", False),
    ]


TOOLS = [
    {"name": "weather", "parameters": {"properties": {"city": {"enum": ["Rome", None]}}}},
    {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"name": "now", "parameters": {"properties": {}}},
]
TALKS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Rome?"}], "tools": TOOLS[:2], "level": None},
    {
        "messages": [{"role": "assistant", "tool_calls": [{"arguments": {"a": 1}}]}],
        "tools": TOOLS[1:],
        "level": 1,
    },
    {
        "messages": [{"role": "assistant", "tool_calls": [{"arguments": {"city": "Rome"}}]}],
        "tools": [],
        "level": None,
    },
]


@pytest.mark.parametrize("kind", ["parquet", "json parquet", "disk", "hub", "stream"])
def test_keys_of_other_objects_are_not_there(tmp_path: Path, kind: str) -> None:
    """Arrow gives each object of a column the keys of all of them."""
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(TALKS), tmp_path / "rows.parquet")
        rows = [(raw.row, raw.fault) for raw in read_file(tmp_path / "rows.parquet")]
    else:
        import datasets

        made = datasets.Dataset.from_list(TALKS)
        if kind == "json parquet":
            made = datasets.Dataset.from_list(TALKS, on_mixed_types="use_json")
            made.to_parquet(tmp_path / "rows.parquet")
            rows = [(raw.row, raw.fault) for raw in read_file(tmp_path / "rows.parquet")]
        else:
            if kind == "disk":
                made.save_to_disk(tmp_path / "set")
            else:
                (tmp_path / "set").mkdir()
                made.to_parquet(tmp_path / "set" / "train.parquet")
            place = SetLocation(str(tmp_path / "set"))
            rows = list(
                split_rows(
                    place,
                    "default",
                    "train",
                    load_split(place, "default", "train", streaming=kind == "stream"),
                )
            )
    assert rows == [(row, None) for row in TALKS]


def test_nulls_that_arrow_did_not_add_are_kept(tmp_path: Path) -> None:
    properties = pa.map_(pa.string(), pa.struct([("default", pa.string()), ("type", pa.string())]))
    table = pa.table(
        {
            "map": pa.array([[("a", {"type": "x"}), ("b", None)]], properties),
            "json": pa.array(['{"default": null}'], pa.string()).cast(pa.json_()),
            "text": ['{"default": null}'],
            "list": [[{"enum": [None, "a"]}]],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    (raw,) = read_file(tmp_path / "rows.parquet")
    assert raw.row == {
        "map": {"a": {"type": "x"}, "b": None},
        "json": {"default": None},
        "text": '{"default": null}',
        "list": [{"enum": [None, "a"]}],
    }
