"""The order of the prompts: complete, new each epoch, deterministic, and resumable from a few numbers."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest

from swift_r1.data.loading import _take_out
from swift_r1.data.prompts import PromptEncoder
from swift_r1.data.rows import Drops
from swift_r1.data.sampler import PromptSampler
from swift_r1.data.store import Part, Rows, block_of, write_store
from swift_r1.errors import UsageError


def drawn(sampler: PromptSampler, rounds: int) -> list[list[int]]:
    return list(islice(sampler, rounds))


def test_an_epoch_may_end_with_its_last_whole_round():
    rounds = drawn(PromptSampler(10, 4, seed=1, drop_last=True), 40)
    epochs = [{*rounds[number], *rounds[number + 1]} for number in range(0, 40, 2)]
    assert {len(rows) for rows in epochs} == {8} and set().union(*epochs) == set(range(10))


def test_every_epoch_is_a_new_permutation() -> None:
    rows = [index for round_ in drawn(PromptSampler(10, 4, seed=1), 10) for index in round_]
    epochs = [rows[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4


def test_same_seed_same_order_other_seed_other_order() -> None:
    assert drawn(PromptSampler(50, 8, seed=3), 20) == drawn(PromptSampler(50, 8, seed=3), 20)
    assert drawn(PromptSampler(50, 8, seed=3), 2) != drawn(PromptSampler(50, 8, seed=4), 2)


def test_the_order_of_a_seed_stays() -> None:
    """A checkpoint says how many prompts were taken of it: another order needs another `_FORMAT` there."""
    assert drawn(PromptSampler(6, 4, seed=5), 3) == [[1, 5, 2, 0], [4, 3, 4, 1], [5, 0, 2, 3]]


def test_without_shuffle() -> None:
    assert drawn(PromptSampler(3, 2, shuffle=False), 3) == [[0, 1], [2, 0], [1, 2]]


def test_more_prompts_than_rows() -> None:
    first = next(PromptSampler(3, 8))
    assert len(first) == 8 and set(first) == {0, 1, 2}


@pytest.mark.parametrize("stop", [0, 1, 2, 7, 13])
def test_resume_is_exact(stop: int) -> None:
    whole = drawn(PromptSampler(10, 4, seed=5), 20)
    before = PromptSampler(10, 4, seed=5)
    drawn(before, stop)
    state = json.loads(json.dumps(before.state_dict()))
    after = PromptSampler(10, 4, seed=5)
    after.load_state_dict(state)
    assert after.state_dict() == before.state_dict() and after.state_dict()["drawn"] == stop * 4
    assert drawn(after, 20 - stop) == whole[stop:]


def test_the_state_stays_small() -> None:
    sampler = PromptSampler(100_000, 64)
    drawn(sampler, 3)
    assert len(json.dumps(sampler.state_dict())) < 200


def test_state_of_other_data_is_refused() -> None:
    state = PromptSampler(10, 4, seed=5).state_dict()
    with pytest.raises(UsageError, match="num_rows 10 became 11, seed 5 became 6"):
        PromptSampler(11, 4, seed=6).load_state_dict(state)


def peak_bytes(work: Callable[[], object]) -> int:
    """Most that Python and numpy held meanwhile; Arrow's own buffers are not counted."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_many_rows_take_some_tens_of_bytes_each(tmp_path: Path) -> None:
    """Of prompts that are looked at, held out and drawn; a Python number or dict entry each would be 2 to 6 times
    that. `fitting` and `_take_out` must find the same rows as without the store's columns."""
    count = 200_000
    row = {"messages": [{"role": "user", "content": "12345678"}]}
    line = json.dumps(row).encode() + b"\n"
    made = {"row": line, "size": 8, "turns": 1, "columns": '["messages"]'}
    blocks = [
        block_of([made | {"name": str(n), "key": n % 150_000} for n in range(first, first + 50_000)], Drops())
        for first in range(0, count, 50_000)
    ]
    store = write_store(tmp_path / "store", blocks, lambda _rows, _drops: None)
    rows = Rows([Part(store, "data", "data", numpy.arange(count))])
    encoder = PromptEncoder(Characters(), max_length=100)
    found: list[Any] = []
    assert peak_bytes(lambda: found.append(encoder.fitting(rows))) < 40 * count
    assert found[0] is rows
    assert peak_bytes(lambda: found.append(_take_out(rows, 500, 3))) < 50 * count
    kept, out = found[1]
    held = set(out.column("key").tolist())
    assert len(held) == len(out) == 500 and held.isdisjoint(kept.column("key").tolist())
    assert len(kept) == count - sum(n % 150_000 in held for n in range(count))
    assert [row["prompt_id"] for row in out] == sorted((f"data:{key}" for key in held), key=lambda one: int(one[5:]))
    assert peak_bytes(lambda: next(PromptSampler(count, 64))) < 20 * count


class Characters:
    """A tokenizer of a token a character."""

    chat_template = "given"

    def apply_chat_template(self, messages: list[dict[str, str]], **_given: Any) -> str:
        return "".join(message["content"] for message in messages) + "\n"

    def __call__(self, text: str, **_given: Any) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}
