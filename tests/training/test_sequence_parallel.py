"""`--sequence_parallel_size`: rows that are spread over ranks have the loss and the gradient of one process."""

import pytest
import torch

from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.sequence_parallel import SequenceGroup
from swift_r1.training.batching import collate, round_batch
from swift_r1.training.micro_batches import Form
from tests.families import save_family

PPO = "--kl_coef 0.1 --gamma 0.95 --lam 0.9 --whiten_rewards true"


@pytest.fixture
def step(jobs):
    """`step(model, ranks=1, cut=...) -> (metrics, gradients)` of one step in plain torch, gradients summed."""

    def run(model, ranks=1, cut="1000", **case):
        result, gradients = jobs.run(ranks, backend="summed", model=model, cuts=cut, **case)
        return result["steps"][0], gradients

    return run


def assert_same(found, expected):
    (metrics, gradients), (wanted, exact) = found, expected
    for name in wanted.keys() - {"micro_batches", "tokens_computed"}:
        assert metrics[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-7), name
    assert wanted["grad_norm"] > 1e-3 and gradients.keys() == exact.keys()
    for name, gradient in exact.items():
        difference = (gradients[name] - gradient).norm() / wanted["grad_norm"]
        assert difference < 1e-5, (name, difference)


@pytest.mark.parametrize(
    ("train", "cut"),
    [
        *(("full", "1000s"), ("full", "24p"), ("lora", "60s")),
        *(
            pytest.param(train, cut, marks=pytest.mark.long)
            for train, cut in (
                *(("full", "1000p"), ("full", "60s")),
                *(("lora", "1000p"), ("lora", "1000s"), ("lora", "24p")),
            )
        ),
    ],
)
def test_two_ranks_of_a_row_equal_one_process(step, tiny_model, train, cut):
    """Two query heads that share a key head; rows of 8 to 250 tokens, odd ones too."""
    assert_same(step(tiny_model, 2, cut, sequence=2, train=train), step(tiny_model, train=train))


def test_everything_that_spans_ranks_counts_a_group_once(step, tiny_model):
    loss = {
        "loss_type": "dapo",
        "top_entropy_quantile": 0.4,
        "overlong_filter": True,
        "kl_in_reward": True,
        "rollout_importance_sampling_mode": "sequence_truncate",
        "rollout_importance_sampling_threshold": 1.1,
    }
    expected = step(tiny_model, loss=loss)
    assert_same(step(tiny_model, 2, "60s", sequence=2, loss=loss, checkpointing=True), expected)
    assert_same(step(tiny_model, 4, "60s", sequence=2, loss=loss), expected)


@pytest.mark.parametrize(
    "family",
    [
        *("gemma3_text", "deepseek_v3", "gpt2"),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (
                *("mistral", "qwen3_moe", "phi3", "cohere2", "smollm3", "opt"),
                *("qwen2_5_vl", "gemma4"),
            )
        ),
    ],
)
def test_families(step, tmp_path, family):
    """Short windows, heads whose values are narrower than their keys, positions that are learned."""
    model = save_family(tmp_path / "model", family)
    assert_same(step(model, 2, "1000p", sequence=2), step(model))


def test_four_ranks_of_a_row_with_copies_of_two_key_heads(step, tmp_path):
    model = save_family(tmp_path / "model", "qwen3", num_attention_heads=4, num_key_value_heads=2)
    assert_same(step(model, 4, "60s", sequence=4), step(model))


def test_a_row_has_a_token_for_every_rank():
    """Models do not compute without tokens. What fills the row up is a sequence of its own, at its end."""
    batch = round_batch([TokenSequence.of_answer([5], [6, 7])], [0.0])
    for size, tokens in ((2, [5, 6, 7]), (4, [5, 6, 7, 0])):
        inputs = collate(
            batch,
            [(0,)],
            Form(packed=True),
            torch.device("cpu"),
            sequence=SequenceGroup(0, size, None),
        ).inputs
        assert inputs.token_ids.tolist() == [tokens] and inputs.positions.tolist() == [0, 1]
        assert [group.own for group in inputs.packed_row.groups] == [
            slice(0, 3),
            slice(3, 4),
        ][: size // 2]


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("ddp", {"ppo": PPO}),
        ("zero3", {"train": "lora"}),
        pytest.param("ddp", {}, marks=pytest.mark.long),
        pytest.param("fsdp2", {"ppo": PPO}, marks=pytest.mark.long),
        pytest.param("zero2", {}, marks=pytest.mark.long),
        pytest.param("zero3", {"ppo": PPO}, marks=pytest.mark.long),
        pytest.param("fsdp2", {"train": "lora", "checkpointing": True}, marks=pytest.mark.long),
    ],
)
def test_every_backend_equals_one_process(jobs, tiny_model, backend, case):
    """Two updates of all weights; the critic's too."""
    found, weights = jobs.run(
        2, backend=backend, model=tiny_model, cuts="60s 70p", sequence=2, **case
    )
    expected, exact = jobs.run(backend="local", model=tiny_model, cuts="150 150", **case)
    for number, (step, wanted) in enumerate(zip(found["steps"], expected["steps"], strict=True)):
        for name in wanted.keys() - {"micro_batches", "tokens_computed"}:
            assert step[name] == pytest.approx(
                wanted[name], rel=1e-5 if number == 0 else 3e-5, abs=1e-6
            ), name
    for name, value in exact.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-4)
