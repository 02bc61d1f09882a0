"""The order of the prompts: complete, new each epoch, deterministic, and resumable from a few numbers."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from swift_r1.data.sampler import PromptSampler
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
