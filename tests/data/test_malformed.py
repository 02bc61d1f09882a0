"""Malformed files: each gives one clear line with file and line number, and stops the command where nothing is left."""

from __future__ import annotations

import gzip
import io
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift_r1.data import files
from swift_r1.data.loading import load_rows
from swift_r1.errors import UsageError
from tests import forks
from tests.data.test_builtin import arguments

GOOD = b'{"question": "1 + 1?", "solution": "2"}\n'


def parquet(rows: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(rows, buffer)
    return buffer.getvalue()


NO_TEXT = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
)
# Nothing of these can be used: name, content, the line it gives ({} is the file).
UNUSABLE = [
    (
        "broken.jsonl",
        b'{"question": "1 + 1?"\n',
        "{}:1: not JSON: Expecting ',' delimiter at column 22",
    ),
    (
        "encoding.jsonl",
        '{"question": "größer?"}\n'.encode("latin-1"),
        "{}:1: not UTF-8 at byte 16 of the line",
    ),
    (
        "utf16.jsonl",
        '{"question": "q"}\n'.encode("utf-16"),
        "{}:1: is UTF-16 or UTF-32 text: convert it to UTF-8",
    ),
    (
        "columns.jsonl",
        b'{"number": 1}\n',
        "{}:1: no prompt: no column is a question or a user message",
    ),
    ("empty.jsonl", b"", "dataset {} has no rows"),
    ("blank.jsonl", b"\n  \n\n", "dataset {} has no rows"),
    ("list.jsonl", b'["question"]\n', "{}:1: a row is an object of columns, this is a list"),
    (
        "doubled.jsonl",
        b'{"question": "a", "question": "b"}\n',
        "{}:1: not JSON that can be read: 'question' is there",
    ),
    (
        "nul.jsonl",
        b'{"question": "a\0b"}\n',
        "{}:1: holds NUL bytes: the file is damaged, or not UTF-8 text",
    ),
    (
        "escaped.jsonl",
        b'{"question": "a\\u0000b"}\n',
        "{}:1: the content of the user message has a NUL character",
    ),
    (
        "column.jsonl",
        b'{"question": "q", "gold": ["\\udfff"]}\n',
        "{}:1: the column gold has half a character",
    ),
    ("blanks.jsonl", b'{"question": " \\n\\t\\u200b\\ufeff"}\n', "{}:1: the user message is empty"),
    (
        "role.jsonl",
        b'{"messages": [{"role": ["user"], "content": "q"}]}\n',
        "{}:1: unknown role ['user'] in messages",
    ),
    (
        "talk.jsonl",
        b'{"messages": "[{\'role\': "}\n',
        "{}:1: ValueError: messages (or a history) as text that is nei",
    ),
    ("packed.jsonl", gzip.compress(GOOD), "{}: is compressed (gzip): unpack it first"),
    (
        "deep.jsonl",
        b'{"question": ' + b"[" * 100_000 + b"\n",
        "{}:1: not JSON that can be read: maximum recursion",
    ),
    (
        "digits.jsonl",
        b'{"question": ' + b"1" * 5_000 + b"}\n",
        "{}:1: not JSON that can be read: Exceeds the limit",
    ),
    (
        "type.jsonl",
        b'{"question": 5}\n',
        "{}:1: the content of the user message is an int, not text",
    ),
    ("cut.json", b'[{"question": "q"},\n', "{}:2: not JSON: Expecting value"),
    ("scalar.json", b"3\n", "{}:1: holds an int, not a list of rows"),
    ("bytes.json", b'[\n{"question": "\xff"}]', "{}:2: not UTF-8 at byte 16"),
    ("ragged.csv", b"question,solution\nq,1,2\n", "{}:2: has 3 values for 2 columns"),
    ("doubled.csv", b"question,question\na,b\n", "{}:1: the column 'question' is there twice"),
    ("empty.csv", b"", "{}:1: not a CSV table: Empty CSV file"),
    (
        "bytes.parquet",
        parquet(pa.table({"question": NO_TEXT})),
        "{} row 1: holds a value that cannot be read: 'utf-8'",
    ),
    ("text.parquet", b"question,solution\n", "{}: not a whole parquet file (read to row 0)"),
    ("rows.xlsx", b"PK\x03\x04", "{}: is compressed (zip)"),
    ("rows.ods", b"", "cannot read .ods files"),
]


@pytest.mark.parametrize(
    ("name", "content", "line"), UNUSABLE, ids=[entry[0] for entry in UNUSABLE]
)
def test_nothing_can_be_used(tmp_path: Path, name: str, content: bytes, line: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_rows(arguments(dataset=[str(file)]))
    (fault,) = caught.value.faults
    assert line.format(file) in fault and "\n" not in fault and len(fault) < 600


LOST = [
    ({"question": "q", "videos": ["a.mp4"]}, "the column videos is not read here"),
    ({"question": "q", "images": ["a.png"]}, "image 1 of 1: there is no file a.png (looked in "),
    ({"question": "q", "tools": '[{"name": "add"'}, "the column tools is not JSON"),
    ({"question": "q", "tools": ["add"]}, "there is no tool add; plugins have registered shell"),
    (
        {"question": "q", "chat_template_kwargs": {"x": 1}},
        "the column chat_template_kwargs is not read",
    ),
    (
        {
            "messages": [
                {"role": "tool_call", "content": "add(1)"},
                {"role": "tool_response", "content": "1"},
            ]
        },
        "a tool call is not JSON",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image_url"}]}
            ]
        },
        "its messages have places for images, and it has none",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "q"}, {"type": "input_audio"}],
                }
            ]
        },
        "the content of the user message has parts of input_audio, and only text is read here",
    ),
]


@pytest.mark.parametrize(("row", "cause"), LOST)
def test_what_no_prompt_would_have_is_refused_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: dict[str, Any], cause: str
) -> None:
    file = tmp_path / "some.jsonl"
    # Empty is nothing to lose.
    empty = {
        "question": "q",
        "videos": [],
        "audio": None,
        "images": None,
        "tools": "[]",
        "chat_template_kwargs": {},
    }
    file.write_text("".join(json.dumps(one) + "\n" for one in (row, empty, row)))
    data = load_rows(arguments(dataset=[str(file)]))
    assert (len(data.train), data.drops.broken) == (1, 2)
    assert "2 of 3 rows left out" in caplog.text and f"{file}:1: {cause}" in caplog.text
    renamed = {"images": "pictures", "videos": "films", "audio": "sound"}
    if not renamed.keys().isdisjoint(row):  # for the rewards, not for the prompt
        assert len(load_rows(arguments(dataset=[str(file)], columns=renamed)).train) == 3


def test_a_huge_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "MAX_LINE", 1 << 20)
    file = tmp_path / "huge.jsonl"
    file.write_bytes(GOOD + b'{"question": "' + b"x" * (3 << 20) + b'"}\n' + GOOD)
    data = load_rows(arguments(dataset=[str(file)], load_from_cache_file=False))
    assert (len(data.train), data.drops.broken) == (2, 1)
    assert f"{file}:2: the line is longer than 1 MiB" in caplog.text
    assert [row["prompt_id"] for row in data.train] == ["huge:0", "huge:2"]


BAD_LINE = b'{"question": \n'


def test_good_rows_are_kept_and_the_first_bad_ones_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes(GOOD + BAD_LINE + b"\n" + GOOD + BAD_LINE * 3 + GOOD)
    with caplog.at_level(logging.INFO):
        data = load_rows(arguments(dataset=[str(file)]))
    assert (len(data.train), data.drops.broken) == (3, 4)
    assert "4 of 7 rows left out" in caplog.text
    shown = [line.strip() for line in caplog.text.splitlines() if "not JSON" in line]
    assert [line.split(": ")[0] for line in shown] == [f"{file}:{number}" for number in (2, 5, 6)]
    with pytest.raises(UsageError, match=rf"--strict true: dataset some: {file}:2: not JSON"):
        load_rows(arguments(dataset=[str(file)], strict=True))  # of rows that are in the cache
    with pytest.raises(UsageError, match=rf"--strict true: dataset some: {file}:2: not JSON"):
        load_rows(arguments(dataset=[str(file)], strict=True, load_from_cache_file=False))


def test_lines_of_a_csv_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "some.csv"
    file.write_bytes(b"question,solution\na?,1\nb?,2,3\nc?,3\nd?\nf?,5\ne?,6\n")
    data = load_rows(arguments(dataset=[str(file)]))
    assert [row["solution"] for row in data.train] == [1, 3, 5, 6]
    assert f"{file}:3: has 3 values for 2 columns" in caplog.text
    assert f"{file}:5: has 1 values for 2 columns" in caplog.text


def test_mixed_types_stay_what_they_are(tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    values = [1, "1", 1.5, None, [1, "a"], {"a": 1}, True]
    file.write_text(
        "".join(json.dumps({"question": "q", "value": value}) + "\n" for value in values)
    )
    rows = load_rows(arguments(dataset=[str(file)])).train
    assert [row["value"] for row in rows] == values
    assert [type(row["value"]) for row in rows] == [type(value) for value in values]


@pytest.mark.long
def test_the_command_ends_with_2(tmp_path: Path) -> None:
    name, content, line = UNUSABLE[0]
    file = tmp_path / name
    file.write_bytes(content)
    command = ["rlhf", "--rlhf_type", "grpo", "--model", str(tmp_path), "--dataset", str(file)]
    command += ["--per_device_train_batch_size", "8"]
    command += ["--reward_funcs", "format", "--output_dir", str(tmp_path / "out")]
    done = forks.run(["-m", "swift_r1", *command], timeout=100)
    assert done.returncode == 2
    lines = [text for text in done.stderr.splitlines() if line.format(file) in text]
    assert (
        len(lines) == 1 and lines[0].startswith("swift rlhf: ") and "Traceback" not in done.stderr
    )
