"""`--dataset` values, every form."""

from __future__ import annotations

import pytest

from swift_r1.data.sources import DatasetSpec, parse_dataset
from swift_r1.errors import UsageError


@pytest.mark.parametrize(
    ("value", "name", "subsets", "sample", "hub"),
    [
        ("countdown", "countdown", (), None, None),
        ("countdown#50000", "countdown", (), 50_000, None),
        ("org/set", "org/set", (), None, None),
        ("org/set:main", "org/set", ("main",), None, None),
        ("org/set:main/socratic#7", "org/set", ("main", "socratic"), 7, None),
        ("org/set:all", "org/set", ("all",), None, None),
        ("hf::org/set", "org/set", (), None, "hf"),
        ("MS::org/set:all#1", "org/set", ("all",), 1, "ms"),
        ("data/a b.jsonl#3", "data/a b.jsonl", (), 3, None),
        ("/tmp/with#hash.jsonl#3", "/tmp/with#hash.jsonl", (), 3, None),
        ("./x.csv", "./x.csv", (), None, None),
        (" countdown ", "countdown", (), None, None),
    ],
)
def test_forms(
    value: str, name: str, subsets: tuple[str, ...], sample: int | None, hub: str | None
) -> None:
    assert parse_dataset(value) == DatasetSpec(value, name, subsets, sample, hub)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "write id"),
        ("#5", "write id"),
        (":main", "write id"),
        ("set:a//b", "write id"),
        ("set#", "number of rows"),
        ("set#0", "number of rows"),
        ("set#-1", "number of rows"),
        ("set#1.5", "number of rows"),
        ("set#ten", "number of rows"),
        ("set#²", "number of rows"),
        ("kaggle::set", "kaggle:: is not a hub"),
    ],
)
def test_malformed(value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_dataset(value)


def test_files_are_told_by_their_suffix() -> None:
    assert parse_dataset("a/b.JSONL#3").is_file
    assert not parse_dataset("hf::a/b.json").is_file
