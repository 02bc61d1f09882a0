"""Completions of several rows: what belongs to a completion and what to a row."""

from __future__ import annotations

import torch

from swift_r1.runtime.ranks import Ranks
from swift_r1.training.batching import Batching, round_batch, split_step
from swift_r1.training.micro_batches import Form

ALONE = Ranks(0, 1, torch.device("cpu"), None)
OWNERS = [0, 0, 1, 2, 3, 3, 3]


def batch():
    """Two groups of two completions, of 2, 1, 1 and 3 rows."""
    prompts = [[7], [7, 8], [7], [9], [9], [9, 5], [9, 5]]
    rows = [[10 * number + place for place in range(1 + number % 3)] for number in range(7)]
    logps = [[-0.1 * token for token in row] for row in rows]
    return round_batch(prompts, rows, logps, [0.0, 1.0, 2.0, 2.0], [False] * 7, owners=OWNERS)


def test_rows_of_completions():
    one = batch()
    assert len(one) == 4
    assert [list(one.rows(range(start, start + 2))) for start in (0, 2)] == [[0, 1, 2], [3, 4, 5, 6]]
    assert one.of_completions(torch.arange(7)).tolist() == [1, 2, 3, 15]
    values = torch.arange(float(one.completion_lengths.sum()))
    assert one.padded(values)[one.token_mask()].tolist() == values.tolist()


def test_every_row_is_trained_once_whatever_the_cut():
    one = batch()
    for form in (Form(), Form(packed=True), Form(packed=True, shared=True)):
        for budget in (4, 100):
            found = [
                sample
                for completions in (range(2), range(2, 4))
                for size in (1, 2, 3)
                for rank in range(size)
                for micro in split_step(
                    one,
                    completions,
                    Batching(form, 1, 2, budget, silent_apart=True),
                    Ranks(rank, size, ALONE.device, None),
                )
                for sample in micro.samples.tolist()
            ]
            assert sorted(found) == sorted(list(range(7)) * 3)
