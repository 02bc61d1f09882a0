"""The losses against TRL 1.16.0, from numbers that TRL wrote (`fixtures/make_trl_cases.py`). TRL is not needed here.

Where we differ from TRL on purpose, so that no case can show agreement:

- `bnpo`: TRL divides by the tokens of each micro-batch, we by those of the optimizer step. TRL's loss therefore
  depends on the cut (the case `bnpo_two_micro_batches` shows it); with one micro-batch they agree.
- `cispo` without `epsilon_high`: TRL caps the ratio at `epsilon` (0.2), we at 5.0. The cases give the cap.
- `cispo`'s clip metric: TRL counts capped ratios of positive advantages only, though the others are capped as well.
- rollout correction of whole sequences: TRL multiplies the ratios of all tokens, we take their geometric mean, as
  ms-swift. Of the token modes the case checks how the weight enters the loss (not the KL).
- TRL computes with NaN where a ratio overflows; we keep log-ratios within 60.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_r1.algorithms.aggregation import loss_normalizer, mean_metrics
from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.losses import LossOutput, policy_loss

DOCUMENT = json.loads(Path(__file__).with_name("fixtures").joinpath("trl_cases.json").read_text())
AGREEING = sorted(set(DOCUMENT["cases"]) - {"bnpo_two_micro_batches"})


def _tensors() -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in DOCUMENT["inputs"].items()}


def _config(settings: dict[str, Any]) -> LossConfig:
    ours = {k: v for k, v in settings.items() if k in LossConfig.__slots__}
    if "rollout" in settings:
        mode, threshold = settings["rollout"]
        ours |= {
            "rollout_importance_sampling_mode": mode,
            "rollout_importance_sampling_threshold": threshold,
        }
    return LossConfig(max_completion_length=DOCUMENT["max_completion_length"], **ours)


def _ours(settings: dict[str, Any], pieces: int = 1) -> tuple[list[LossOutput], torch.Tensor]:
    given = _tensors()
    config = _config(settings)
    mask = given["mask"]
    if "masked_row" in settings:
        mask[settings["masked_row"]] = 0
    advantages = given["token_advantages" if settings.get("token_advantages") else "advantages"]
    logps = given["logps"].requires_grad_()
    outputs = [
        policy_loss(
            logps[rows],
            given["old_logps"][rows],
            advantages[rows],
            mask[rows],
            config,
            ref_logps=given["ref_logps"][rows],
            rollout_logps=given["rollout_logps"][rows],
            entropies=given["entropies"][rows],
            normalizer=loss_normalizer(mask, config),
        )
        for rows in torch.arange(len(mask)).chunk(pieces)
    ]
    torch.stack([output.loss for output in outputs]).sum().backward()
    assert logps.grad is not None
    return outputs, logps.grad


@pytest.mark.parametrize("name", AGREEING)
def test_loss_and_gradient_agree_with_trl(name: str) -> None:
    case = DOCUMENT["cases"][name]
    (output,), grad = _ours(case["settings"])
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-6, abs=1e-6)
    torch.testing.assert_close(grad, torch.tensor(case["grad"]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", AGREEING)
def test_metrics_agree_with_trl(name: str) -> None:
    case = DOCUMENT["cases"][name]
    settings = case["settings"]
    (output,), _ = _ours(settings)
    ours = mean_metrics(output.metrics)
    expected = {"entropy": case["metrics"]["entropy"]}
    if settings.get("beta"):
        expected["kl"] = case["metrics"]["kl"]
    if settings["loss_type"] not in ("cispo", "sapo"):
        expected["clip_ratio/low"] = case["metrics"]["clip_ratio/low_mean"]
        expected["clip_ratio/high"] = case["metrics"]["clip_ratio/high_mean"]
    assert {key: ours[key] for key in expected} == pytest.approx(expected, abs=1e-6)


def test_bnpo_differs_from_trl_by_not_depending_on_the_cut() -> None:
    settings = DOCUMENT["cases"]["bnpo_two_micro_batches"]["settings"]
    whole, whole_grad = _ours(settings)
    parts, parts_grad = _ours(settings, pieces=2)
    total = sum(part.loss.item() for part in parts)
    assert total == pytest.approx(whole[0].loss.item(), rel=1e-6)
    torch.testing.assert_close(parts_grad, whole_grad, rtol=1e-5, atol=1e-8)
    assert abs(total - DOCUMENT["cases"]["bnpo_two_micro_batches"]["loss"]) > 1e-3
