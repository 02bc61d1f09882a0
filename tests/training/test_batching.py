"""Ragged completions to micro-batches: nothing lost, nothing twice, targets where they are predicted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.training.batching import collate, round_batch
from swift_r1.training.micro_batches import Form, RowLengths, plan_micro_batches


def ragged(lengths, prompt_lengths, alike=()):
    """Completion i holds the tokens 100 i, 100 i + 1, ...; its prompt 100 i + 50, ..., or that of the first one `alike`."""
    prompts = [[100 * i + 50 + k for k in range(p)] for i, p in enumerate(prompt_lengths)]
    for i in alike:
        prompts[i] = prompts[alike[0]]
    completions = [[100 * i + k for k in range(n)] for i, n in enumerate(lengths)]
    pairs = zip(prompts, completions, strict=True)
    rows = [
        TokenSequence(prompt, ids, [-float(t) for t in ids], [True] * len(ids))
        for prompt, ids in pairs
    ]
    rewards = [float(i) for i in range(len(lengths))]
    truncated = [length == max(lengths) for length in lengths]
    return round_batch(rows, rewards, truncated), prompts, completions


CPU = torch.device("cpu")
FORMS = [Form(), Form(packed=True), Form(packed=True, shared=True)]


@st.composite
def steps(draw):
    """World size, group size and the lengths of whole groups."""
    world, size, groups = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 9))
    prompts = [
        p
        for p in draw(st.lists(st.integers(1, 30), min_size=groups, max_size=groups))
        for _ in range(size)
    ]
    completions = draw(st.lists(st.integers(1, 40), min_size=groups * size, max_size=groups * size))
    numbers = [i // size for i in range(groups * size)]
    silent = draw(st.lists(st.booleans(), min_size=groups, max_size=groups))
    return world, RowLengths(
        prompts, completions, numbers, draw(st.sampled_from([[], [silent[i] for i in numbers]]))
    )


@settings(max_examples=200, deadline=None)
@given(steps(), st.sampled_from(FORMS), st.integers(1, 400))
def test_every_completion_is_dealt_once_within_the_budget(step, form, budget):
    world, lengths = step
    plan = plan_micro_batches(lengths, form, world, budget)
    hands = [[sample for units in rank for unit in units for sample in unit] for rank in plan]
    assert sorted(sample for hand in hands for sample in hand) == list(range(len(lengths)))
    counts = {len(hand) for hand in hands}
    assert len(counts) == 1 or len(lengths) % world
    assert form.shared or max(counts) - min(counts) <= 1
    assert len({len(rank) for rank in plan}) == 1
    filled = [[units for units in rank if units] for rank in plan]
    for rank, micro_batches in zip(plan, filled, strict=True):
        assert rank[: len(micro_batches)] == micro_batches
        # Only who has a micro-batch for each of its units has empty ones.
        assert rank == micro_batches or all(len(units) == 1 for units in micro_batches)
        assert (
            sorted(micro_batches, key=lambda units: not lengths.teaches(units[0])) == micro_batches
        )
    for units in (units for rank in filled for units in rank):
        assert form.cost(units, lengths) <= budget or [len(unit) for unit in units] == [1]
        assert all(len({lengths.groups[sample] for sample in unit}) == 1 for unit in units)
        assert len({lengths.teaches(unit) for unit in units}) == 1


def test_groups_stay_whole_where_ranks_and_budget_allow():
    form = Form(packed=True, shared=True)
    lengths = RowLengths([10] * 8, [5] * 8, [i // 4 for i in range(8)])
    assert plan_micro_batches(lengths, form, 1, 60) == [[[(0, 1, 2, 3), (4, 5, 6, 7)]]]
    assert plan_micro_batches(lengths, form, 2, 30) == [[[(0, 1, 2, 3)]], [[(4, 5, 6, 7)]]]
    assert plan_micro_batches(lengths, form, 1, 29) == [[[(0, 1)], [(2, 3)], [(4, 5)], [(6, 7)]]]
    assert plan_micro_batches(lengths, form, 4, 60) == [
        [[(0, 1)]],
        [[(2, 3)]],
        [[(4, 5)]],
        [[(6, 7)]],
    ]
    # A step that begins inside a group.
    lengths = RowLengths([10] * 4, [5] * 4, [0, 1, 1, 1])
    assert plan_micro_batches(lengths, form, 1, 60) == [[[(1, 2, 3), (0,)]]]


@pytest.mark.parametrize("form", FORMS)
def test_a_micro_batch_without_completions_has_a_row_and_trains_nothing(form):
    batch, *_ = ragged([3, 1, 5], [2, 4, 1])
    micro = collate(batch, [], form, CPU)
    assert micro.inputs.token_ids.shape == (1, 1)
    assert (
        micro.mask.shape == (0, 1) and micro.samples.tolist() == micro.inputs.targets.tolist() == []
    )
    assert micro.unflatten(torch.zeros(0, 2)).shape == (0, 1, 2)
