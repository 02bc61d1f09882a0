"""The table of completions: it says what the file says, while the file grows, is cut, or is damaged."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.failures import FAILURES
from swift_r1.lab.runs.query import FAILURE, CompletionQuery
from tests.lab.runs.made import KINDS, completions, make_run, write_rows

pytest.importorskip("duckdb")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the columns that the table adds."""
    return [{key: value for key, value in row.items() if key != FAILURE} for row in rows]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=8)


@pytest.fixture
def table(run: Path):
    with CompletionTable(run / "completions.jsonl") as table:
        table.refresh()
        yield table


def test_the_page_is_the_file(run, table):
    rows = rows_of(run / "completions.jsonl")
    assert table.count(CompletionQuery()) == len(rows) == 64
    assert plain(table.page(CompletionQuery(), 10, 5)) == rows[10:15]
    assert table.columns == [*rows[0], FAILURE]
    assert table.steps() == [1, 3, 5, 7]
    assert table.problems == []


QUERIES = {
    "steps": (CompletionQuery(steps=(3, 5)), lambda row: 3 <= row["step"] <= 5),
    "prompt": (CompletionQuery(prompt_id="countdown:1"), lambda row: row["prompt_id"] == "countdown:1"),
    "reason": (CompletionQuery(where=(("finish_reason", "=", "length"),)), lambda row: row["finish_reason"] == "length"),
    "text": (CompletionQuery(text='MAKE countdown:1.\n'), lambda row: row["prompt_id"] == "countdown:1"),
    "percent": (CompletionQuery(text="50 %</think>\n<"), lambda row: "50 %</think>\n<" in row["completion"]),
    "any": (CompletionQuery(text="%"), lambda row: "%" in row["completion"]),
    "underscore": (CompletionQuery(text="_"), lambda row: False),
    "quoted": (CompletionQuery(text='"3"'), lambda row: True),
    "key": (CompletionQuery(text="finish_reason"), lambda row: False),
    "number": (CompletionQuery(where=[("reward", ">", 0.5)]), lambda row: (row["reward"] or 0) > 0.5),
    "null": (CompletionQuery(where=[("reward", "=", None)]), lambda row: row["reward"] is None),
    "not null": (CompletionQuery(where=[("reward", "!=", None)]), lambda row: row["reward"] is not None),
    "reward": (CompletionQuery(where=[("rewards/format", "<", "1")]), lambda row: row["rewards/format"] < 1),
    "data": (CompletionQuery(where=[("target", ">=", 5), ("nums", "contains", "9,8")]), lambda row: row["target"] >= 5),
    "hostile": (CompletionQuery(text="'; DROP TABLE completions; --", where=[('a"b', "=", "'")]), lambda row: False),
}  # fmt: skip


@pytest.mark.parametrize("name", QUERIES)
def test_filters(run, table, name):
    query, keep = QUERIES[name]
    expected = [row for row in rows_of(run / "completions.jsonl") if keep(row)]
    assert plain(table.page(query, 0, 1000)) == expected
    assert table.count(query) == len(expected)


@pytest.mark.parametrize(
    "column", ["reward", "advantage", "rewards/countdown", "target", "prompt_id", "tokens"]
)
@pytest.mark.parametrize("descending", [False, True])
def test_sorting_puts_null_last(run, table, column, descending):
    rows = rows_of(run / "completions.jsonl")
    known = sorted(
        (row for row in rows if row[column] is not None),
        key=lambda row: row[column],
        reverse=descending,
    )
    null = [row for row in rows if row[column] is None]
    found = table.page(CompletionQuery(order_by=column, descending=descending), 0, 1000)
    assert [row[column] for row in found] == [row[column] for row in [*known, *null]]


def test_classes(run, table):
    made = Counter()
    for place, row in enumerate(rows_of(run / "completions.jsonl")):
        made[row["step"], "right" if row["group"] == 0 else KINDS[place % 6]] += 1
    found = {
        (row["step"], name): row[name]
        for row in table.failure_classes()
        for name in FAILURES
        if row[name]
    }
    assert found == made
    query = CompletionQuery(where=[(FAILURE, "=", "truncated")])
    assert {row["finish_reason"] for row in table.page(query)} == {"length"}


def test_new_lines_come_without_reading_anew(run, table):
    path = run / "completions.jsonl"
    before = table.count(CompletionQuery())
    classes = table.failure_classes()
    line = json.dumps(
        {"step": 9, "prompt_id": "new", "completion": "x", "reward": 1, "late column": 5}
    )
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert table.refresh() == 0
        assert table.problems == ["completions.jsonl: the last line is half-written, and left out"]
        file.write(line[20:] + "\n")
    assert table.refresh() == 1
    assert table.problems == []
    assert table.count(CompletionQuery()) == before + 1
    assert plain(table.page(CompletionQuery(prompt_id="new"))) == [json.loads(line)]
    assert table.columns[-2] == "late column"
    assert table.failure_classes() == [
        *classes,
        {"step": 9} | dict.fromkeys(FAILURES, 0) | {"wrong value": 1},
    ]


def test_a_file_that_is_cut_or_replaced_is_read_anew(run, table):
    path = run / "completions.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]))
    table.refresh()
    assert table.count(CompletionQuery()) == 5
    with path.open("r+b") as file:  # cut, and grown again beyond where it was
        file.truncate(0)
        for row in completions(20, 4, 4, 8, seed=7):
            file.write(json.dumps(row).encode() + b"\n")
    table.refresh()
    assert plain(table.page(CompletionQuery(), 0, 1000)) == rows_of(path)
    other = path.with_name("other")
    other.write_bytes(whole)
    other.replace(path)
    table.refresh()
    assert plain(table.page(CompletionQuery(), 0, 1000)) == rows_of(path)
    path.unlink()
    table.refresh()
    assert table.count(CompletionQuery()) == 0


def test_damage_is_left_out_and_said(tmp_path):
    path = tmp_path / "completions.jsonl"
    good = [
        {
            "step": 1,
            "prompt_id": "a",
            "completion": "nul \0 é",
            "reward": "high",
            "A": 1,
            "a": "two",
            "q'\"/~": [1],
        },
        {"step": 1, "prompt_id": "b", "completion": "x" * 5_000_000, "reward": 2, "A": {"z": 1}},
    ]
    lines = [json.dumps(row).encode() for row in good]
    bad = [
        b'{"step": 1, "prompt',
        b"\0" * 50,
        b"[1]",
        b"",
        b'{"step": "one"}',
        b'{"step": 1, "completion": "\xff"}',
    ]
    path.write_bytes(b"\n".join([lines[0], *bad, lines[1], b""]))
    with CompletionTable(path) as table:
        table.refresh()
        assert table.count(CompletionQuery()) == 3
        found = plain(table.page(CompletionQuery()))
        assert found[0] == good[0]
        assert found[1]["completion"] == "\ufffd"
        assert found[2] == good[1]
        assert table.problems == [
            "completions.jsonl: 5 damaged lines are left out",
            "completions.jsonl: bytes that are not UTF-8 are replaced, in 1 lines",
            "completions.jsonl: reward is not a number in 1 rows",
        ]
        assert table.columns[:-1] == [
            "step",
            "prompt_id",
            "completion",
            "reward",
            "A",
            "a",
            "q'\"/~",
        ]
        for column, value in (("A", 1), ("a", "two"), ("q'\"/~", "[1]")):
            assert table.count(CompletionQuery(where=[(column, "=", value)], order_by=column)) == 1
        assert table.count(CompletionQuery(text="NUL \0 É")) == 1


def test_lines_that_only_one_of_two_parsers_takes(tmp_path):
    """DuckDB takes for JSON what Python does not."""
    path = tmp_path / "completions.jsonl"
    odd = [
        '{"step": 1, "reward": 1,}',
        '{"step": 1, "number": inf, "late": 3}',
        f'{{"step": 1, "nested": {"[" * 100_000}{"]" * 100_000}}}',
        f'{{"step": 1, "digits": {"9" * 5000}}}',
    ]
    path.write_text("\n".join(['{"step": 1, "completion": "good", "a\\u0000b": 1}', *odd, ""]))
    with CompletionTable(path) as table:
        table.refresh()
        assert [row["completion"] for row in table.page(CompletionQuery())] == ["good"]
        assert len(table.failure_classes()) == 1
        assert table.columns[:3] == ["step", "completion", "a\0b"] and "late" in table.columns


def test_very_long_completions(tmp_path):
    """Parsed several at a time they must fit into DuckDB's memory."""
    path = tmp_path / "completions.jsonl"
    rows = list(completions(2, 2, 4, 3))
    for row in rows:
        row["completion"] = f"{row['number']} " * 2_500_000 + row["completion"]
    write_rows(path, rows)
    with CompletionTable(path) as table:
        table.refresh()
        assert table.problems == []
        assert table.count(CompletionQuery(text="3 3 3 3", order_by="target")) == 2
        assert sum(table.failure_classes()[0][name] for name in FAILURES) == len(rows)
        found = table.page(CompletionQuery())
        assert [row["completion"] for row in found] == [row["completion"] for row in rows]


def test_no_file_yet(tmp_path):
    with CompletionTable(tmp_path / "completions.jsonl") as table:
        assert table.refresh() == 0
        assert (table.columns, table.steps(), table.problems) == ([FAILURE], [], [])
        assert (table.page(CompletionQuery()), table.failure_classes()) == ([], [])
        write_rows(table.path, completions(2, 1, 2, 3))
        assert table.refresh() == 2


def test_groups(run, table):
    rows = rows_of(run / "completions.jsonl")
    own = [row for row in rows if (row["step"], row["group"]) == (3, 2)]
    assert plain(table.group(3, 2)) == own


def test_what_cannot_be_asked():
    with CompletionTable(Path("none")) as table:
        with pytest.raises(ValueError, match="unknown operator 'LIKE'"):
            table.count(CompletionQuery(where=[("reward", "LIKE", 1)]))
        assert table.count(CompletionQuery(group=10**60, steps=(-(10**60), 10**60))) == 0
        with pytest.raises(ValueError, match="null is not < anything"):
            table.count(CompletionQuery(where=[("reward", "<", None)]))
