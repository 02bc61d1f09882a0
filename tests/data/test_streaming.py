"""Rows that are read while a run trains: what is waited for, the order, and going back to a position."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from swift_r1.data import DatasetMeta, register_dataset
from swift_r1.data import registry as registry_module
from swift_r1.data.loading import load_rows, stream_of
from swift_r1.data.streaming import RowStream
from swift_r1.errors import RunFailed, UsageError
from swift_r1.rollout.prompts import StreamedPrompts
from tests.data.test_builtin import arguments


def streaming(dataset: list[str], fits: Any = lambda row: True, **flags: Any) -> RowStream:
    given = {"streaming": True, "dataset_shuffle": True, "shuffle_buffer_size": 10} | flags
    return stream_of(arguments(dataset=dataset, **given), fits)


def jsonl(path: Path, count: int) -> str:
    path.write_text(
        "".join(json.dumps({"question": f"{n}?", "solution": n}) + "\n" for n in range(count))
    )
    return str(path)


def solutions(rows: Any) -> list[int]:
    return [row["solution"] for row in rows]


class Encoder:
    """Renders a row as its question; stands for the tokenizer, which has no part in the order."""

    def encode(self, row: dict[str, Any]) -> Any:
        return row["solution"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that the dataset `counted` has given out."""
    given: list[int] = []

    def load() -> Iterator[dict[str, Any]]:
        for number in range(1000):
            given.append(number)
            yield {"question": f"{number}?", "solution": number}

    monkeypatch.setattr(registry_module, "datasets", dict(registry_module.datasets))
    monkeypatch.setattr("swift_r1.data.resolve.datasets", registry_module.datasets)
    register_dataset(DatasetMeta(dataset_name="counted", loader=load), exist_ok=True)
    return given


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_more_is_read_than_the_buffer_holds(counted: list[int], shuffle: bool) -> None:
    data = load_rows(arguments(dataset=["counted"], streaming=True))
    assert len(data.train) == 4 and len(counted) <= 5
    counted.clear()
    rows = streaming(["counted"], dataset_shuffle=shuffle, shuffle_buffer_size=100)
    prompts = StreamedPrompts(rows, Encoder(), 0, "")  # type: ignore[arg-type]
    first = prompts.take(80)
    assert (first == list(range(80))) is not shuffle and len(set(first)) == 80
    assert len(counted) <= 80 + 100 * shuffle + 1


def test_the_order_is_that_of_the_seed(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", 50)
    first, again = (solutions(islice(streaming([file]), 150)) for _ in range(2))
    assert first == again
    assert first != solutions(islice(streaming([file], seed=1), 150))
    epochs = [first[start : start + 50] for start in (0, 50, 100)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    straight = solutions(islice(streaming([file], dataset_shuffle=False), 60))
    assert straight == [*range(50), *range(10)]


def test_numbers_of_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [jsonl(tmp_path / "a.jsonl", 5), jsonl(tmp_path / "b.jsonl", 30)]
    with caplog.at_level(logging.INFO):
        rows = list(
            islice(streaming([f"{files[0]}#12", f"{files[1]}#3"], dataset_shuffle=False), 15)
        )
    assert solutions(rows) == [*range(5), *range(5), 0, 1, 0, 1, 2]
    assert "dataset a has 5 rows, repeated to make 12" in caplog.text
    rows = list(islice(streaming([f"{files[0]}#12"]), 40))
    assert max(Counter(row["prompt_id"] for row in rows).values()) == 1


def test_long_and_broken_rows_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Path(jsonl(tmp_path / "a.jsonl", 10))
    file.write_text(file.read_text() + "{broken\n")
    rows = streaming([str(file)], fits=lambda row: row["solution"] % 2 == 0)
    with caplog.at_level(logging.INFO):
        assert sorted(solutions(islice(rows, 6))[:5]) == [0, 2, 4, 6, 8]
    assert "5 prompts left out: longer than --max_length" in caplog.text
    assert "1 of 11 rows left out" in caplog.text
    with pytest.raises(UsageError, match="no training row is left"):
        list(islice(streaming([str(file)], fits=lambda row: False), 1))
    with pytest.raises(RunFailed, match=rf"--strict true: dataset a: {file}:11"):
        StreamedPrompts(streaming([str(file)], strict=True), Encoder(), 0, "").take(40)  # type: ignore[arg-type]


def test_going_back_to_a_position(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", 30)
    whole = StreamedPrompts(streaming([file]), Encoder(), 0, "")  # type: ignore[arg-type]
    before = whole.take(45)
    position = whole.taken, whole.digest
    after = whole.take(20)
    again = StreamedPrompts(streaming([file]), Encoder(), *position)  # type: ignore[arg-type]
    assert again.take(3) + again.take(17) == after != before[:20]
    assert (again.taken, again.digest) == (whole.taken, whole.digest)


def test_other_data_is_seen(tmp_path: Path) -> None:
    file = Path(jsonl(tmp_path / "a.jsonl", 30))
    whole = StreamedPrompts(streaming([str(file)]), Encoder(), 0, "")  # type: ignore[arg-type]
    whole.take(45)
    file.write_text(file.read_text().replace('"solution": 20', '"solution": 21'))
    again = StreamedPrompts(streaming([str(file)]), Encoder(), 45, whole.digest)  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match="is not what it was"):
        again.take(1)


def test_held_out_rows(tmp_path: Path) -> None:
    train, val = jsonl(tmp_path / "a.jsonl", 5), jsonl(tmp_path / "b.jsonl", 8)
    data = load_rows(arguments(dataset=[train], val_dataset=[val], evaluates=True, streaming=True))
    assert sorted(solutions(data.eval)) == list(range(8))
    with pytest.raises(UsageError, match="give --val_dataset"):
        load_rows(arguments(dataset=[train], evaluates=True, streaming=True))
    data = load_rows(
        arguments(dataset=["countdown#50"], evaluates=True, eval_limit=4, streaming=True)
    )
    assert len(data.eval) == 4 and data.eval[0]["prompt_id"] == "countdown/eval:0"
