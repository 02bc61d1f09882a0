"""The order of the prompts: complete, new each epoch, or chosen by what became of those before; deterministic, and
resumable."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import islice
from types import SimpleNamespace

import pytest

from swift_r1.data.choices import Choices
from swift_r1.data.sampler import Outcome, PromptSampler, Sampler, build_sampler, samplers
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


def test_state_of_other_data_is_refused() -> None:
    state = PromptSampler(10, 4, seed=5).state_dict()
    with pytest.raises(UsageError, match="num_rows 10 became 11, seed 5 became 6"):
        PromptSampler(11, 4, seed=6).load_state_dict(state)


ARGS = SimpleNamespace(dataset_shuffle=True, data_seed=5)


def sampler(name: str, rows: int = 20) -> Sampler:
    return build_sampler(name, [{"number": number} for number in range(rows)], ARGS)


def told(rates: dict[int, float]) -> list[Outcome]:
    return [Outcome(row, 1, rate, rate, 0 < rate < 1, 0.1) for row, rate in rates.items()]


def rounds_of(
    choices: Choices, numbers: Sequence[int], count: int, hears: Callable[[int], int]
) -> list[list[int]]:
    """What is chosen for these rounds, where `hears(number)` rounds are over when one is begun; pass rates follow."""
    found, heard = [], numbers[0] if numbers else 0
    chance = random.Random(1)
    rates = {row: chance.choice([0.0, 0.25, 0.5, 1.0]) for row in range(20)}
    for number in numbers:
        while heard < hears(number):
            places = range(heard * count, heard * count + count)
            choices.hear(
                heard, told({choices.row(place): rates[choices.row(place)] for place in places})
            )
            heard += 1
        choices.choose(number * count + count, number)
        found.append(
            [choices.row(place) for place in range(number * count, number * count + count)]
        )
    return found


def test_uniform_as_a_sampler_has_the_order_of_the_run_without_one() -> None:
    assert [sampler("uniform").next(7)] == drawn(PromptSampler(20, 7, seed=5), 1)


@pytest.mark.parametrize("name", sorted(samplers))
@pytest.mark.parametrize("stop", [1, 2, 9])
def test_a_sampler_goes_on_where_it_was(name: str, stop: int) -> None:
    whole = rounds_of(Choices(sampler(name)), range(20), 4, lambda number: number)
    before = Choices(sampler(name))
    assert rounds_of(before, range(stop), 4, lambda number: number) == whole[:stop]
    last = [before.row(place) for place in range(stop * 4 - 4, stop * 4)]
    # The last round was not trained on: it is taken again.
    after = Choices(sampler(name), 0, stop * 4 - 4, before.state(stop * 4 - 4))
    after.choose(stop * 4, stop - 1)
    assert [after.row(place) for place in range(stop * 4 - 4, stop * 4)] == last == whole[stop - 1]
    assert rounds_of(after, range(stop - 1, 20), 4, lambda number: number) == whole[stop - 1 :]


def test_what_a_round_begins_with_does_not_depend_on_the_time() -> None:
    """Six rounds ahead: whether the trainer was at its latest or at its earliest when they were begun."""
    name = "difficulty"
    late = rounds_of(
        Choices(sampler(name), ahead=6), range(20), 4, lambda number: max(0, number - 6)
    )
    assert late == rounds_of(Choices(sampler(name), ahead=6), range(20), 4, lambda number: number)
    assert late != rounds_of(Choices(sampler(name)), range(20), 4, lambda number: number)


def test_difficulty_takes_rows_of_one_half_first_and_rests_them() -> None:
    one = sampler("difficulty", 100)
    first = one.next(8)
    assert len(set(first)) == 8
    one.tell(told(dict(zip(first, [0.0, 1.0, 0.5, 0.25, 0.75, 0.5, 0.95, 0.375], strict=True))))
    seen = {row for _ in range(4) for row in one.next(8)}
    assert seen.isdisjoint(first) and len(seen) == 32
    again = one.next(8)
    # Nearest to one half, and of those alike the first chosen.
    assert again[:5] == [first[2], first[5], first[7], first[3], first[4]] and set(
        again[5:]
    ).isdisjoint({*first, *seen})


def test_difficulty_keeps_only_what_may_come_again() -> None:
    """A checkpoint does not grow by every row that was ever chosen."""
    one = sampler("difficulty", 1000)
    for _ in range(50):
        one.tell(told(dict.fromkeys(one.next(8), 0.0)))
    assert len(one.state_dict()["last"]) <= 5 * 8 and one.state_dict()["rates"] == []


def test_a_few_rows_are_enough_for_every_sampler() -> None:
    for name in samplers:
        one = sampler(name, 3)
        for _ in range(9):
            rows = one.next(8)
            assert len(rows) == 8 and set(rows) <= {0, 1, 2}
            one.tell(told(dict.fromkeys(rows, 0.5)))
