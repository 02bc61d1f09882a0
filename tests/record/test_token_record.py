"""The files of the token record: whole or not there, bounded, and never in the way of training."""

import logging
import os
import resource

import numpy
import pytest
from pyarrow import parquet

from swift_r1.record.token_record import TokenRows, TokenWriter, cut_record


def rows_of(step, count=3):
    """`count` completions of 1, 2, ... tokens, of which the record has no more than an engine tells."""
    lengths = numpy.arange(1, count + 1)
    random = numpy.random.default_rng(step)
    return TokenRows(
        completions=[
            {
                "round_step": step,
                "prompt_id": "a:1",
                "request_id": f"r/{step}",
                "number": number,
                "group": 0,
                "sample": 9,
            }
            for number in range(count)
        ],
        prompt_lengths=numpy.full(count, 2),
        prompt_token_ids=numpy.tile([5, 6], count),
        lengths=lengths,
        tokens={
            "token_ids": random.integers(0, 100, lengths.sum()),
            "rollout_logps": random.normal(size=lengths.sum()).astype(numpy.float32),
            "mask": numpy.ones(lengths.sum(), numpy.float32),
        },
    )


@pytest.fixture
def writer(tmp_path):
    """`writer(limit) -> TokenWriter`, closed at the end."""
    made = []

    def open_writer(limit=1e9):
        made.append(
            TokenWriter(tmp_path / "tokens", limit, lambda: [(b"\xc3", False), (b"<e>", True)])
        )
        return made[-1]

    yield open_writer
    for one in made:
        one.close()


def names(tmp_path):
    return sorted(path.name for path in (tmp_path / "tokens").iterdir())


def test_a_file_has_what_was_given(writer, tmp_path):
    one, rows = writer(), rows_of(7)
    one.write(7, rows)
    one.flush()
    assert names(tmp_path) == ["step-000007.parquet", "vocabulary.parquet"]
    table = parquet.read_table(tmp_path / "tokens" / "step-000007.parquet")
    found = table.to_pylist()
    assert [
        (row["step"], row["round_step"], row["request_id"], row["number"]) for row in found
    ] == [(7, 7, "r/7", number) for number in range(3)]
    assert [row["prompt_token_ids"] for row in found] == [[5, 6]] * 3
    for name in ("token_ids", "rollout_logps"):
        assert [token for row in found for token in row[name]] == rows.tokens[name].tolist()
    assert [row["mask"] for row in found] == [[True], [True] * 2, [True] * 3]
    assert {row["logps"] for row in found} == {None}
    types = {field.name: str(field.type).partition(": ")[2].rstrip(">") for field in table.schema}
    assert (
        types["clipped"] == "int8"
        and types["ratios"] == "float"
        and types["weight_versions"] == "int32"
    )
    vocabulary = parquet.read_table(tmp_path / "tokens" / "vocabulary.parquet").to_pylist()
    assert vocabulary == [
        {"token_id": 0, "bytes": b"\xc3", "special": False},
        {"token_id": 1, "bytes": b"<e>", "special": True},
    ]


def test_a_full_disk_costs_its_files_alone(writer, tmp_path, caplog):
    """Here no file may be longer than 100 bytes for a while."""
    one = writer()
    one.write(1, rows_of(1))
    one.flush()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        for step in (2, 3):
            one.write(step, rows_of(step))
        one.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    one.write(4, rows_of(4))
    one.close()
    assert names(tmp_path) == ["step-000001.parquet", "step-000004.parquet", "vocabulary.parquet"]
    said = [record.getMessage() for record in caplog.records]
    assert (
        len(said) == 2
        and said[0].startswith("step-000002.parquet is left out")
        and "File too large" in said[0]
    )
    assert said[1].startswith("2 files were left out of")


def test_a_disk_that_stands_still_does_not_hold_up_training(writer, tmp_path, caplog):
    """The vocabulary goes into a pipe that nobody reads yet; meanwhile 256 MiB may wait, and no more."""
    pipe = tmp_path / "tokens" / ".writing-vocabulary.parquet"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    one, small = writer(), rows_of(1)
    zeros = numpy.zeros(50 << 20, numpy.int32)
    large = TokenRows(small.completions, small.prompt_lengths, zeros, small.lengths, small.tokens)
    one.write(1, small)
    one.write(2, large)
    one.write(3, large)
    assert [record.getMessage()[:31] for record in caplog.records] == [
        "step-000003.parquet is left out"
    ]
    with pipe.open("rb"):
        one.flush()
    assert {"step-000001.parquet", "step-000002.parquet"} <= set(names(tmp_path))
    assert "step-000003.parquet" not in names(tmp_path)


def test_thinned_evenly_and_the_same_wherever_it_was_killed(writer, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    one = writer()
    one.write(1, rows_of(1))
    one.close()
    limit = 4.5 * (tmp_path / "tokens" / "step-000001.parquet").stat().st_size
    cut_record(tmp_path, -1)
    assert names(tmp_path) == ["vocabulary.parquet"]

    def write(steps):
        one = writer(limit)
        for step in steps:
            one.write(step, rows_of(step))
            one.flush()
            assert (
                sum(path.stat().st_size for path in (tmp_path / "tokens").glob("step-*")) <= limit
            )
        one.close()
        return names(tmp_path)

    whole = write(range(1, 28))
    assert whole == [
        "step-000008.parquet",
        "step-000016.parquet",
        "step-000024.parquet",
        "stride",
        "vocabulary.parquet",
    ]
    assert sum("--log_tokens_limit" in record.getMessage() for record in caplog.records) == 1
    (tmp_path / "tokens" / "stride").unlink()
    cut_record(tmp_path, -1)
    # resumed from what it had before `first`
    for first, killed in ((1, 12), (3, 20), (3, 5), (6, 25), (20, 27)):
        cut_record(tmp_path, first - 1)
        found = write(range(first, killed + 1))
    assert found == whole


def test_killed_while_it_thinned(writer, tmp_path):
    """The stride is written, and no file is removed yet."""
    one = writer()
    for step in (1, 2, 3):
        one.write(step, rows_of(step))
    one.close()
    (tmp_path / "tokens" / "stride").write_text("2")
    size = (tmp_path / "tokens" / "step-000001.parquet").stat().st_size
    one = writer(2.5 * size)
    one.write(4, rows_of(4))
    one.close()
    assert names(tmp_path) == [
        "step-000002.parquet",
        "step-000004.parquet",
        "stride",
        "vocabulary.parquet",
    ]
    assert (tmp_path / "tokens" / "stride").read_text() == "2"


def test_what_is_later_or_half_written_goes(tmp_path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name in (
        "step-000003",
        "step-000004",
        "vocabulary",
        ".writing-step-000002",
    ):
        (folder / f"{name}.parquet").write_bytes(b"PAR1")
    cut_record(tmp_path, 3)
    assert names(tmp_path) == ["step-000003.parquet", "vocabulary.parquet"]
    cut_record(tmp_path / "no run", 3)
