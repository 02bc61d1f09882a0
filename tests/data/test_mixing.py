"""`--interleave_prob`: data sets mixed as `datasets.interleave_datasets` mixes them."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest

from swift_r1.data.loading import load_rows
from tests.data.test_builtin import arguments
from tests.data.test_streaming import jsonl, streaming

SIZES = (60, 20)
STRATEGIES = ("first_exhausted", "all_exhausted")


def made(folder: Path) -> list[str]:
    return [jsonl(folder / f"{name}.jsonl", size) for name, size in zip("ab", SIZES, strict=True)]


def theirs(strategy: Any, probabilities: list[float]) -> list[tuple[str, int]]:
    sets = [
        datasets.Dataset.from_list([{"name": name, "number": n} for n in range(size)])
        for name, size in zip("ab", SIZES, strict=True)
    ]
    mixed = datasets.interleave_datasets(sets, probabilities, seed=42, stopping_strategy=strategy)
    return [(row["name"], row["number"]) for row in mixed]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.9, 0.1]])
def test_a_stream_has_the_rows_and_the_order_of_datasets(
    tmp_path: Path, strategy: str, shares: list[float]
) -> None:
    expected = theirs(strategy, shares)
    flags = {"interleave_prob": shares, "stopping_strategy": strategy, "dataset_shuffle": False}
    rows = list(islice(streaming(made(tmp_path), **flags), len(expected) + 1))
    assert [(row["dataset"], row["solution"]) for row in rows[:-1]] == expected
    assert len({row["prompt_id"] for row in rows}) == len(rows) and rows[-1]["prompt_id"].endswith(
        "@1"
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.9, 0.1]])
def test_loaded_rows_are_as_many_of_each(
    tmp_path: Path, strategy: str, shares: list[float]
) -> None:
    given = arguments(dataset=made(tmp_path), interleave_prob=shares, stopping_strategy=strategy)
    train = load_rows(given).train
    assert Counter(row["dataset"] for row in train) == Counter(
        name for name, _ in theirs(strategy, shares)
    )
    assert len({row["prompt_id"] for row in train}) == len(train) and list(train) == list(
        load_rows(given).train
    )
    for name, size in zip("ab", SIZES, strict=True):
        times = Counter(row["solution"] for row in train if row["dataset"] == name)
        assert max(times.values()) - min(times.values()) <= 1 and (
            len(times) == size or set(times.values()) == {1}
        )
