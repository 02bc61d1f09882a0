"""Completions of several rows: what belongs to a completion and what to a row."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_r1.algorithms.advantages import Advantages
from swift_r1.algorithms.config import LossConfig
from swift_r1.models.loading import load_model
from swift_r1.models.policy import Policy
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, round_batch, split_step
from swift_r1.training.grpo import before_training, known_advantages, train_step
from swift_r1.training.micro_batches import Form
from swift_r1.training.optimizer import OptimizerConfig

ALONE = Ranks(0, 1, torch.device("cpu"), None)
SETTINGS = OptimizerConfig(1e-3, 0.0, 0.9, 0.95, 1e-8, 1.0)
OWNERS = [0, 0, 1, 2, 3, 3, 3]


def batch():
    """Two groups of two completions, of 2, 1, 1 and 3 rows."""
    prompts = [[7], [7, 8], [7], [9], [9], [9, 5], [9, 5]]
    rows = [[10 * number + place for place in range(1 + number % 3)] for number in range(7)]
    pairs = zip(prompts, rows, strict=True)
    sequences = [
        TokenSequence(prompt, ids, [-0.1 * t for t in ids], [True] * len(ids))
        for prompt, ids in pairs
    ]
    return round_batch(sequences, [0.0, 1.0, 2.0, 2.0], owners=OWNERS)


def test_a_completion_on_which_nothing_is_trained_has_no_advantage():
    one = replace(batch(), rewards=torch.tensor([0.0, torch.nan, 2.0, torch.nan]))
    of_completions = torch.tensor([-1.0, 0.0, 0.0, 0.5])  # the last one's is of its turns
    known = partial(known_advantages, advantages=Advantages(of_completions, of_completions))
    found = known(one, overlong_filter=True).tolist()
    assert found == [-1.0, pytest.approx(torch.nan, nan_ok=True), 0.0, 0.5]
    cut = replace(one, truncated=torch.tensor([0, 0, 0, 1, 0, 0, 0]))
    assert known(cut, overlong_filter=False)[2] == 0.0
    assert known(cut, overlong_filter=True)[2].isnan()
    written = (one.owners != 0).repeat_interleave(one.completion_lengths)
    silent = replace(one, loss_mask=one.loss_mask * written)
    assert known(silent, overlong_filter=False)[0].isnan()


GSPO: dict[str, Any] = {"importance_sampling_level": "sequence", "epsilon": 0.05}
BY_COMPLETION: list[dict[str, Any]] = [
    GSPO,
    GSPO | {"loss_type": "bnpo"},
    {"importance_sampling_level": "sequence_token", "epsilon": 0.05},
    {
        "rollout_importance_sampling_mode": "sequence_mask",
        "rollout_importance_sampling_threshold": 1.05,
    },
    {
        "rollout_importance_sampling_mode": "sequence_truncate",
        "rollout_importance_sampling_threshold": 1.05,
    },
    {"off_policy_sequence_mask_delta": 0.05},
    {"loss_type": "gmpo", "epsilon": 0.05},
    {"loss_type": "dr_grpo", "max_completion_length": 9},
]


@pytest.mark.parametrize("flags", BY_COMPLETION)
def test_what_is_of_a_completion_is_the_same_in_one_row_or_in_several(
    tiny_model: Path, flags: dict[str, Any]
) -> None:
    """The second row of two goes on where the first one ends, so each token has the log-prob of the uncut one. The
    model computes in float64: an update by Adam makes the last bit of a tiny gradient a step of full size."""
    generator = torch.Generator().manual_seed(1)
    whole = [
        torch.randint(3, 90, (length,), generator=generator).tolist() for length in (8, 5, 7, 9)
    ]
    wide = [torch.randn(len(row), generator=generator).tolist() for row in whole]
    config = LossConfig(**flags, log_rollout_offpolicy_metrics=True)

    def learned(cuts: list[int]) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics of two updates, with completions in two rows where they are cut."""
        device = ALONE.device
        backend = LocalBackend(
            load_model(str(tiny_model), "float64", False), SETTINGS, device, Policy
        )
        parts = [
            (number, stop)
            for number, cut in enumerate(cuts)
            for stop in ((0, cut) if cut else (0,))
        ]
        prompts = [[7, 8, *whole[number][:start]] for number, start in parts]
        ends = [
            cuts[number] if start == 0 and cuts[number] else len(whole[number])
            for number, start in parts
        ]
        rows = [whole[number][start:end] for (number, start), end in zip(parts, ends, strict=True)]
        engine = [
            [-7.4 + 0.6 * one for one in wide[n][start:end]]
            for (n, start), end in zip(parts, ends, strict=True)
        ]
        owners = [number for number, _ in parts]
        masks = [[True] * len(row) for row in rows]
        sequences = [TokenSequence(*row) for row in zip(prompts, rows, engine, masks, strict=True)]
        one = round_batch(sequences, [0.0] * 4, owners=owners)
        batches = split_step(one, range(4), Batching(Form(), 1, 2, 20), ALONE)
        [prepared] = before_training([batches], backend, None, 1.0, old_policy=True)
        advantages = torch.tensor([-1.0, 1.0, -0.5, 0.5])[one.owners]
        how: Any = (backend, config, 1.0, 2e-2, ALONE)
        first, second = (
            train_step(prepared, advantages, *how, owners=one.owners) for _ in range(2)
        )
        return first, second

    updates = list(zip(learned([0, 0, 0, 0]), learned([3, 0, 2, 7]), strict=True))
    for uncut, cut in updates:
        assert cut.keys() == uncut.keys() >= {"clip_ratio/low", "rollout/training_ppl"}
        for name in cut.keys() - {"micro_batches", "tokens_computed"}:
            assert cut[name] == pytest.approx(uncut[name], rel=1e-5, abs=1e-6), name
