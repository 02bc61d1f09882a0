"""From flags to rows: registered datasets, files, sampling, held-out rows, broken rows, clear errors."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_r1.data import (
    DatasetMeta,
    ResponsePreprocessor,
    RowPreprocessor,
    load_dataset,
    register_dataset,
)
from swift_r1.data import registry as registry_module
from swift_r1.data.loading import columns_of, first_rows, load_rows, row_without
from swift_r1.data.rows import prompt_key
from swift_r1.errors import UsageError
from tests.data.test_builtin import arguments

REPO = Path(__file__).parents[2]
DATA = Path(os.environ.get("SWIFT_R1_DATA", REPO / ".." / "shared" / "data"))


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"question {n}?", "solution": n} for n in range(start, start + count)]


def solutions(rows: Any) -> list[int]:
    return [row["solution"] for row in rows]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "datasets", dict(registry_module.datasets))
    monkeypatch.setattr("swift_r1.data.resolve.datasets", registry_module.datasets)
    monkeypatch.setattr(registry_module, "_origins", dict(registry_module._origins))


def test_a_file(tmp_path: Path) -> None:
    data = load_rows(arguments(dataset=[jsonl(tmp_path / "sums.jsonl", questions(3))]))
    assert data.train[1] == {
        "question": "question 1?",
        "solution": 1,
        "messages": [{"role": "user", "content": "question 1?"}],
        "dataset": "sums",
        "prompt_id": "sums:1",
    }
    assert data.eval == []
    assert columns_of(data.train, data.eval) == {
        "question",
        "solution",
        "messages",
        "dataset",
        "prompt_id",
    }


def test_sampling_is_deterministic_and_repeats_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = jsonl(tmp_path / "sums.jsonl", questions(20))
    first, again = (solutions(load_rows(arguments(dataset=[f"{file}#5"])).train) for _ in range(2))
    assert first == again and len(set(first)) == 5
    assert solutions(load_rows(arguments(dataset=[f"{file}#5"], seed=1)).train) != first
    with caplog.at_level(logging.INFO):
        many = load_rows(arguments(dataset=[f"{file}#50"])).train
    assert "has 20 rows, repeated to make 50" in caplog.text
    assert solutions(many)[:40] == [*range(20), *range(20)]
    assert len(set(solutions(many)[40:])) == 10
    assert len({row["prompt_id"] for row in many}) == 50


def test_files_of_one_name_keep_apart(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = [
        jsonl(tmp_path / "a.jsonl", questions(2)),
        jsonl(tmp_path / "other" / "a.jsonl", questions(2, 5)),
    ]
    rows = load_rows(arguments(dataset=files)).train
    assert [row["prompt_id"] for row in rows] == ["a:0", "a:1", "a-2:0", "a-2:1"]
    assert {row["dataset"] for row in rows} == {"a"}


def test_held_out_rows_are_taken_out_of_the_training_rows(tmp_path: Path) -> None:
    rows = [*questions(30), *questions(30)]  # every prompt twice
    data = load_rows(
        arguments(dataset=[jsonl(tmp_path / "a.jsonl", rows)], evaluates=True, eval_limit=8)
    )
    assert len(data.eval) == len(set(solutions(data.eval))) == 8
    assert len(data.train) == 60 - 2 * 8
    assert {prompt_key(row) for row in data.train}.isdisjoint(prompt_key(row) for row in data.eval)
    assert data == load_rows(
        arguments(dataset=[str(tmp_path / "a.jsonl")], evaluates=True, eval_limit=8)
    )


def test_split_ratio(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", questions(100))
    data = load_rows(arguments(dataset=[file], split_dataset_ratio=0.2))
    assert (len(data.train), len(data.eval)) == (80, 20)
    assert sorted(solutions(data.train) + solutions(data.eval)) == list(range(100))
    with pytest.raises(UsageError, match="give one"):
        load_rows(arguments(dataset=[file], split_dataset_ratio=0.2, val_dataset=[file]))


def test_ms_swifts_call(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", questions(100))
    train, held_out = load_dataset(f"{file}#50", split_dataset_ratio=0.1, seed=3)
    assert (len(train), len(held_out)) == (45, 5)


def test_val_dataset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, val = (
        jsonl(tmp_path / "a.jsonl", questions(10)),
        jsonl(tmp_path / "b.jsonl", questions(10, 8)),
    )
    data = load_rows(arguments(dataset=[train], val_dataset=[val], evaluates=True, eval_limit=5))
    assert len(data.train) == 10
    assert len(data.eval) == 5 and set(solutions(data.eval)) <= set(range(8, 18))
    assert "2 of 10 held-out prompts are in the training rows too" in caplog.text


def test_the_loaders_own_held_out_split() -> None:
    def loader(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
        return questions(count or 1000, 0 if split == "train" else 10_000)

    register_dataset(DatasetMeta(dataset_name="made", loader=loader))
    data = load_rows(arguments(dataset=["made#10"], evaluates=True, eval_limit=4))
    assert solutions(data.train) == list(range(10))
    assert solutions(data.eval) == list(range(10_000, 10_004))
    assert data.eval[0]["prompt_id"] == "made/eval:0"
    data = load_rows(arguments(dataset=["made#10"], val_dataset=["made#3"], evaluates=True))
    assert solutions(data.eval) == [10_000, 10_001, 10_002]


@pytest.mark.parametrize(
    ("known", "otherwise", "counts"),
    [("eval", "raises", True), ("test", "trains", False), ("validation", "nothing", True)],
)
def test_what_a_loader_calls_its_held_out_split(
    known: str, otherwise: str, counts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def rows(split: str, count: int | None = None) -> list[dict[str, Any]]:
        if split == known:
            return questions(6, 997)
        if split == "train" or otherwise == "trains":
            return questions(count or 1_000)
        return {"nothing": []}[otherwise]

    loader = rows if counts else lambda split: rows(split)
    register_dataset(DatasetMeta(dataset_name="made", loader=loader))
    data = load_rows(arguments(dataset=["made#1000"], evaluates=True, eval_limit=6))
    assert sorted(solutions(data.eval)) == list(range(997, 1_003))
    assert "3 of 6 held-out prompts are in the training rows too" in caplog.text
    register_dataset(DatasetMeta(dataset_name="none", loader=lambda split: {"train": []}[split]))
    with pytest.raises(UsageError, match=r"KeyError: 'eval' .* 'eval' or 'test' or 'valid"):
        load_rows(arguments(dataset=["made#9"], val_dataset=["none"], evaluates=True))


def test_a_loader_without_a_held_out_split_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    register_dataset(DatasetMeta(dataset_name="made", loader=lambda split: questions(10)))
    data = load_rows(arguments(dataset=["made"], evaluates=True, eval_limit=4))
    assert len(data.eval) == 4
    assert "its loader gives training rows as held-out ones" in caplog.text
    assert "4 of 4 held-out prompts are in the training rows too" in caplog.text


def test_a_plain_loader_with_subsets() -> None:
    def loader(subset: str | None) -> list[dict[str, Any]]:
        return questions(4, {"easy": 0, "hard": 100, None: 50}[subset])

    register_dataset(DatasetMeta(dataset_name="levels", subsets=["easy", "hard"], loader=loader))
    assert solutions(load_rows(arguments(dataset=["levels:hard"])).train) == [100, 101, 102, 103]
    assert len(load_rows(arguments(dataset=["levels:all#6"])).train) == 6
    assert solutions(load_rows(arguments(dataset=["levels"])).train) == [50, 51, 52, 53]
    with pytest.raises(UsageError, match="no subset middle; levels has easy, hard"):
        load_rows(arguments(dataset=["levels:middle"]))


def test_a_registered_file_is_found_by_each_of_its_names(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", questions(3))
    register_dataset(
        DatasetMeta(ms_dataset_id="org/sums", hf_dataset_id="other/adds", dataset_path=file)
    )
    for name in ("org/sums", "other/adds", "sums", file):
        assert load_rows(arguments(dataset=[name])).train[0]["dataset"] == "org/sums"


class Picky(ResponsePreprocessor):
    def preprocess(self, row: dict[str, Any]) -> Any:
        if row["kind"] == "raise":
            return row["no such column"]
        if row["kind"] == "drop":
            return None
        if row["kind"] == "two":
            return [super(Picky, self).preprocess(dict(row)) for _ in range(2)]
        if row["kind"] == "text":
            return "not a row"
        return super().preprocess(row)


def test_broken_rows_are_dropped_counted_and_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ["fine", "raise", "drop", "two", "text", "fine", "raise"]
    file = jsonl(
        tmp_path / "a.jsonl", [{"question": f"{n}?", "kind": kind} for n, kind in enumerate(kinds)]
    )
    register_dataset(DatasetMeta(dataset_name="picky", dataset_path=file, preprocess_func=Picky()))
    data = load_rows(arguments(dataset=["picky"]))
    assert [row["prompt_id"] for row in data.train] == [
        "picky:0",
        "picky:3",
        "picky:3.1",
        "picky:5",
    ]
    assert data.drops.broken == 3
    assert "3 of 7 rows left out" in caplog.text
    assert f"{file}:2: KeyError: 'no such column' ({__file__}:" in caplog.text
    assert f"{file}:5: the preprocessor returned a str" in caplog.text


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"kept": 1}, "no prompt: no column is a question"),
        (
            {"kept": 1, "Questoin": "x"},
            """--columns '{"Questoin": "query"}' makes one the question""",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "content of the user message is None"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no prompt"),
        ({"messages": ["hello"]}, ""),
    ],
)
def test_rows_without_a_prompt(tmp_path: Path, row: dict[str, Any], cause: str) -> None:
    with pytest.raises(UsageError, match=f"none of its 2 rows can be used: .*{re.escape(cause)}"):
        load_rows(arguments(dataset=[jsonl(tmp_path / "a.jsonl", [row, row])]))


@pytest.mark.parametrize("key", ["messages", "conversations", "question"])
def test_contents_may_be_lists_of_parts_of_text(tmp_path: Path, key: str) -> None:
    said = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]
    value = (
        said
        if key == "question"
        else [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
    )
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({key: value}))
    [row] = load_rows(arguments(dataset=[str(file)])).train
    assert row["messages"] == [{"role": "user", "content": "2 + 3?"}]


def test_the_reference_answer_is_not_in_the_prompt(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "secret"}])
    for columns in ({}, {"answer": "answer"}):
        row = load_rows(arguments(dataset=[file], columns=columns)).train[0]
        assert row["messages"] == [{"role": "user", "content": "q"}]
        assert row["answer"] == "secret", "for the rewards"


PLAIN = {"question": "1+1?"}
CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("rows", "answered"),
    [
        ([PLAIN | {"answer": "2"}, PLAIN | {"solution": "2"}], True),
        ([{"messages": [*CHAT, {"role": "assistant", "content": "2"}]}], True),
        ([PLAIN | {"gold": "2"}], False),
        ([PLAIN | {"answer": "2"}, PLAIN], False),
        ([PLAIN | {"answer": 2}], False),
        ([{"messages": CHAT, "answer": "2"}], False),
        ([{"nothing": "2"}, PLAIN | {"answer": "2"}], True),  # left out by both
    ],
)
def test_rows_are_answered_where_sft_can_learn_all_of_them(
    tmp_path: Path, rows: list[dict[str, Any]], answered: bool
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", rows)
    flags = arguments(dataset=[path])
    assert load_rows(flags).answered is answered
    assert load_rows(flags).answered is answered  # from the cache
    try:
        learned = len(load_rows(replace(flags, whole=True)).train)
    except UsageError:
        learned = 0
    usable = sum("nothing" not in row for row in rows)
    assert (learned == usable) is answered


def test_an_answer_that_its_preprocessor_takes_is_none_to_learn() -> None:
    def load(count: int | None = None) -> Any:
        return ({"question": "reach it", "target": str(n)} for n in range(count or 8))

    class Takes(ResponsePreprocessor):
        def preprocess(self, row: dict[str, Any]) -> Any:
            row["target"] = row.pop("response")
            return super().preprocess(row)

    for name, preprocess in (("keeps", ResponsePreprocessor()), ("takes", Takes())):
        register_dataset(DatasetMeta(dataset_name=name, loader=load, preprocess_func=preprocess))
        assert load_rows(arguments(dataset=[name])).answered is (name == "keeps")


@pytest.mark.parametrize(
    "name", ["dataset", "prompt_id", "completions", "trainer_state", "is_truncated"]
)
def test_a_column_with_a_name_of_ours_is_an_error(tmp_path: Path, name: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"question": "q", name: 1}])
    with pytest.raises(UsageError, match=f"has a column {name}, a name that rewards get from us"):
        load_rows(arguments(dataset=[file]))
    assert load_rows(arguments(dataset=[file], columns={name: "mine"})).train[0]["mine"] == 1


def test_columns_flag(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"Stem": "q", "answer": "1", "extra": 2}])
    renamed = arguments(dataset=[file], columns={"stem": "query", "answer": "solution"})
    row = load_rows(renamed).train[0]
    assert (row["solution"], row["answer"], row["Stem"]) == ("1", "1", "q")
    with pytest.raises(
        UsageError, match="no dataset has a column stm; there are Stem, answer, extra"
    ):
        first_rows(arguments(dataset=[file], columns={"stm": "query"}))
    with pytest.raises(UsageError, match="has a column of the new name already"):
        load_rows(arguments(dataset=[file], columns={"answer": "extra"}))


def test_unknown_names_are_all_reported_with_near_misses(tmp_path: Path) -> None:
    register_dataset(DatasetMeta(dataset_name="quadratic", loader=lambda: questions(2)))
    file = jsonl(tmp_path / "questions.jsonl", questions(2))
    with pytest.raises(UsageError) as caught:
        load_rows(arguments(dataset=["quadrati#5", f"{tmp_path}/question.jsonl", "quadratic"]))
    first, second = caught.value.faults
    assert "did you mean quadratic?" in first and "Registered:" in first
    assert f"did you mean {file}?" in second


def test_a_loader_that_raises_is_one_line() -> None:
    register_dataset(DatasetMeta(dataset_name="bad", loader=lambda: [][1]))
    with pytest.raises(UsageError, match="the loader of dataset bad failed: IndexError"):
        load_rows(arguments(dataset=["bad"]))


def test_registering_twice() -> None:
    def register(name: str) -> None:
        register_dataset(DatasetMeta(dataset_name=name, hf_dataset_id=f"org/{name}"))

    register("one")
    register("one")  # the same line again: a plugin loaded twice
    with pytest.raises(UsageError, match=r"dataset one is registered twice: at .*test_loading.py"):
        register_dataset(DatasetMeta(dataset_name="one"))
    with pytest.raises(UsageError, match="org/one"):
        register_dataset(DatasetMeta(dataset_name="two", hf_dataset_id="org/one"))
    register_dataset(DatasetMeta(dataset_name="one"), exist_ok=True)
    with pytest.raises(UsageError, match="no dataset_name"):
        register_dataset(DatasetMeta())


def test_preview_reads_no_more_than_it_must(tmp_path: Path) -> None:
    seen = []

    class Counting(RowPreprocessor):
        def preprocess(self, row: dict[str, Any]) -> Any:
            seen.append(row)
            return {
                "messages": [{"role": "user", "content": row["question"]}],
                "solution": row["solution"],
            }

    rows: list[dict[str, Any]] = [{"wrong": 1}, *questions(1000)]
    file = jsonl(tmp_path / "a.jsonl", rows)
    register_dataset(
        DatasetMeta(dataset_name="counted", dataset_path=file, preprocess_func=Counting())
    )
    rows = first_rows(arguments(dataset=["counted#500"]), 3)
    assert len(rows) == 3
    assert columns_of(rows) == {"messages", "solution", "dataset", "prompt_id"}
    assert len(seen) == 4


def test_columns_are_those_that_every_row_has(tmp_path: Path) -> None:
    files = [
        jsonl(tmp_path / "a.jsonl", [{"question": "q", "level": 1, "solution": 1}]),
        jsonl(tmp_path / "b.jsonl", [{"question": "q", "solution": 1}]),
    ]
    rows = load_rows(arguments(dataset=files)).train
    columns = columns_of(rows)
    assert (
        row_without("level", rows),
        row_without("solution", rows),
        row_without("gone", rows),
    ) == ("b:0", None, None)
    assert row_without("gone", [{"solution": 1}]) is None, "the columns of a recorded row"
    assert columns == {"question", "solution", "messages", "dataset", "prompt_id"}


@pytest.mark.data
def test_the_shared_data_sets() -> None:
    if not DATA.is_dir():
        pytest.skip(f"no data sets in {DATA}")
    files = sorted([*DATA.glob("*.jsonl"), *DATA.glob("math_eval/*.jsonl")])
    assert len(files) >= 8
    for file in files:
        lines = sum(1 for line in file.read_bytes().split(b"\n") if line.strip())
        data = load_rows(arguments(dataset=[str(file)]))
        assert (len(data.train), data.drops.broken) == (lines, 0), file
