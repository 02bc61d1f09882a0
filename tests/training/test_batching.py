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


def test_collate_puts_targets_logps_and_mask_where_they_belong():
    batch, prompts, completions = ragged([3, 1, 5], [2, 4, 1])
    micro = collate(batch, [(2,), (0,)], Form(), CPU)
    assert micro.inputs.token_ids.tolist() == [
        prompts[2] + completions[2],
        [*prompts[0], *completions[0], 0],
    ]
    assert micro.mask.sum(1).tolist() == [5, 3]
    assert micro.inputs.targets.tolist() == completions[2] + completions[0]
    assert micro.samples.tolist() == [2, 0]
    assert micro.trained.equal(micro.mask)
    filtered = collate(batch, [(2,), (0,)], Form(), CPU, overlong_filter=True)
    assert filtered.trained.sum(1).tolist() == [0, 3] and filtered.mask.equal(micro.mask)
    assert micro.inputs.position_ids is None
    assert micro.rollout_logps[1].tolist() == [-0.0, -1.0, -2.0, 0.0, 0.0]
    assert_targets_follow_their_context(micro, prompts, completions)


def test_packing_puts_the_same_samples_into_one_row():
    batch, prompts, completions = ragged([3, 1, 5], [2, 4, 1])
    packed, padded = (
        collate(batch, [(2,), (0,)], form, CPU) for form in (Form(packed=True), Form())
    )
    assert packed.inputs.token_ids.tolist() == [
        [*prompts[2], *completions[2], *prompts[0], *completions[0]]
    ]
    assert packed.inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]]
    assert_targets_follow_their_context(packed, prompts, completions)
    assert torch.equal(packed.inputs.targets, padded.inputs.targets)
    for name in ("mask", "trained", "rollout_logps", "samples"):
        assert torch.equal(getattr(packed, name), getattr(padded, name)), name


def test_a_shared_prompt_stands_once_before_its_completions():
    batch, prompts, completions = ragged([3, 1, 5], [2, 2, 1], alike=(0, 1))
    micro = collate(batch, [(1, 0), (2,)], Form(packed=True, shared=True), CPU)
    row = [*prompts[1], *completions[0], *completions[1], *prompts[2], *completions[2]]
    assert micro.inputs.token_ids.tolist() == [row]
    assert micro.inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 0, 1, 2, 3, 4, 5]]
    assert micro.inputs.targets.tolist() == completions[1] + completions[0] + completions[2]
    last = prompts[1][-1]
    before = micro.inputs.token_ids.flatten()[micro.inputs.positions].tolist()
    assert before == [last, last, *completions[0][:-1], prompts[2][-1], *completions[2][:-1]]
    prompt, completed, alone = micro.inputs.packed_row.groups
    assert (prompt.before, prompt.own, prompt.continued) == ((), slice(0, 2), True)
    assert (completed.before, completed.own) == ((slice(0, 2),), slice(2, 6))
    assert (completed.count, completed.width, completed.places.tolist()) == (2, 3, [0, 1, 2, 3])
    assert (alone.before, alone.own, alone.continued) == ((), slice(6, 12), False)


def assert_targets_follow_their_context(micro, prompts, completions):
    # The position before each target holds the token that the target follows.
    before = micro.inputs.token_ids.flatten()[micro.inputs.positions].tolist()
    assert before == [prompts[2][-1], *completions[2][:-1], prompts[0][-1], *completions[0][:-1]]
    assert micro.unflatten(micro.inputs.targets.float())[1].tolist() == [0.0, 1.0, 2.0, 0.0, 0.0]
