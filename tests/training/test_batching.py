"""Ragged completions to micro-batches: nothing lost, nothing twice, targets where they are predicted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.training.batching import collate, round_batch, split_micro_batches


def ragged(lengths, prompt_lengths):
    """Completion i holds the tokens 100 i, 100 i + 1, ...; its prompt counts down to 100 i - 1."""
    prompts = [[100 * i + 50 + k for k in range(p)] for i, p in enumerate(prompt_lengths)]
    completions = [[100 * i + k for k in range(n)] for i, n in enumerate(lengths)]
    logprobs = [[-float(token) for token in row] for row in completions]
    rewards = [float(i) for i in range(len(lengths))]
    truncated = [length == max(lengths) for length in lengths]
    return round_batch(prompts, completions, logprobs, rewards, truncated), prompts, completions


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 3).flatmap(
        lambda world: st.integers(1, 3).flatmap(
            lambda micro: st.tuples(
                st.just(world),
                st.just(micro),
                st.integers(1, 4).flatmap(
                    lambda size: st.lists(
                        st.integers(1, 40), min_size=world * micro * size, max_size=world * micro * size
                    )
                ),
            )
        )
    )
)
def test_every_sample_is_dealt_once_and_all_micro_batches_have_one_size(case):
    world, micro, lengths = case
    plan = split_micro_batches(lengths, world, micro)
    assert [len(rank) for rank in plan] == [micro] * world
    dealt = [sample for rank in plan for batch in rank for sample in batch]
    assert sorted(dealt) == list(range(len(lengths)))
    assert {len(batch) for rank in plan for batch in rank} == {len(lengths) // (world * micro)}


def test_similar_lengths_share_a_micro_batch():
    plan = split_micro_batches([1, 9, 2, 8, 1, 9, 2, 8], world_size=2, micro_batches=2)
    assert [sorted({[1, 9, 2, 8][i % 4] for i in batch}) for rank in plan for batch in rank] == [
        [8, 9],
        [1, 2],
        [8, 9],
        [1, 2],
    ]


def test_uneven_samples_are_refused():
    with pytest.raises(ValueError, match="cannot be dealt"):
        split_micro_batches([1, 2, 3], 2, 1)


def test_collate_puts_targets_logps_and_mask_where_they_belong():
    batch, prompts, completions = ragged([3, 1, 5], [2, 4, 1])
    micro = collate(batch, [2, 0], torch.device("cpu"))
    assert micro.token_ids.tolist() == [prompts[2] + completions[2], [*prompts[0], *completions[0], 0]]
    assert micro.mask.sum(1).tolist() == [5, 3]
    assert micro.targets.tolist() == completions[2] + completions[0]
    assert micro.samples.tolist() == [2, 0]
    assert micro.truncated.tolist() == [True, False]
    assert micro.position_ids is None
    assert micro.rollout_logps[1].tolist() == [-0.0, -1.0, -2.0, 0.0, 0.0]
    assert_targets_follow_their_context(micro, prompts, completions)


def test_packing_puts_the_same_samples_into_one_row():
    batch, prompts, completions = ragged([3, 1, 5], [2, 4, 1])
    packed, padded = (collate(batch, [2, 0], torch.device("cpu"), packing) for packing in (True, False))
    assert packed.token_ids.tolist() == [[*prompts[2], *completions[2], *prompts[0], *completions[0]]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]]
    assert_targets_follow_their_context(packed, prompts, completions)
    for name in ("targets", "mask", "truncated", "rollout_logps", "samples"):
        assert torch.equal(getattr(packed, name), getattr(padded, name)), name


def assert_targets_follow_their_context(micro, prompts, completions):
    # The position before each target holds the token that the target follows.
    before = micro.token_ids.flatten()[micro.positions].tolist()
    assert before == [prompts[2][-1], *completions[2][:-1], prompts[0][-1], *completions[0][:-1]]
    assert micro.unflatten(micro.targets.float())[1].tolist() == [0.0, 1.0, 2.0, 0.0, 0.0]
