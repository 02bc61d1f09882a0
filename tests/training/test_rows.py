"""Completions of several rows: what belongs to a completion and what to a row."""

from __future__ import annotations

import pytest
import torch

from swift_r1.algorithms import LossConfig, loss_normalizer, policy_loss
from swift_r1.algorithms.losses import LossType
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


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "bnpo"])
def test_a_completion_weighs_the_same_in_one_row_or_in_several(loss_type: LossType) -> None:
    """The loss of completions that were cut into rows is that of whole ones, whatever the micro-batches."""
    one, generator = batch(), torch.Generator().manual_seed(0)
    logps = one.padded(torch.randn(int(one.completion_lengths.sum()), generator=generator))
    advantages, config = torch.randn(4, generator=generator), LossConfig(loss_type=loss_type, max_completion_length=9)
    whole_logps = torch.zeros(4, 6)
    whole_mask = torch.zeros(4, 6, dtype=torch.bool)
    for owner in range(4):
        tokens = torch.cat([logps[row, : one.completion_lengths[row]] for row in range(7) if OWNERS[row] == owner])
        whole_logps[owner, : len(tokens)], whole_mask[owner, : len(tokens)] = tokens, True
    expected = policy_loss(whole_logps, whole_logps - 0.1, advantages, whole_mask, config).loss
    for budget in (4, 100):
        batches = split_step(one, range(4), Batching(Form(), 1, 2, budget), ALONE)
        normalizer = torch.stack([loss_normalizer(micro.trained, config, micro.shares) for micro in batches]).sum()
        found = []
        for micro in batches:
            own = logps[micro.samples, : micro.mask.shape[1]]
            of_rows, more = advantages[one.owners[micro.samples]], {"shares": micro.shares, "normalizer": normalizer}
            found.append(policy_loss(own, own - 0.1, of_rows, micro.trained, config, **more).loss)
        torch.testing.assert_close(torch.stack(found).sum(), expected)
