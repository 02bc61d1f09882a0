"""Losses of pairs: against ms-swift's and TRL's on the same log-probs, and what no other library says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from swift_r1.algorithms.preferences import DPO_LOSSES, AnswerSums, PreferenceConfig, compared
from swift_r1.flags import preferences as flags
from tests.training.fixtures import make_preference_losses as theirs

CASES = json.loads(theirs.FILE.read_text())


def interleaved(chosen: list[float], rejected: list[float]) -> torch.Tensor:
    return torch.tensor([chosen, rejected], dtype=torch.float64).T.flatten()


def answers(referred: bool = True) -> AnswerSums:
    logps = interleaved(theirs.CHOSEN, theirs.REJECTED)
    reference = interleaved(**theirs.REFERENCE) * referred
    return AnswerSums(logps, logps, reference, interleaved(**theirs.TOKENS))


def config(kind: str, loss: str, divergence: str = "reverse_kl") -> PreferenceConfig:
    return PreferenceConfig(
        rlhf_type=kind,
        loss_type=[loss] if kind != "orpo" else [],
        beta=theirs.SETTINGS["beta"],
        label_smoothing=theirs.SETTINGS["label_smoothing"],
        discopop_tau=theirs.SETTINGS["discopop_tau"],
        f_divergence_type=divergence,
        f_alpha_divergence_coef=theirs.SETTINGS["alpha"],
        simpo_gamma=theirs.SIMPO_GAMMA,
        cpo_alpha=0.0,
    )


@pytest.mark.parametrize("case", CASES)
def test_equals_ms_swift_and_trl(case: str) -> None:
    kind, loss, divergence = case.split()
    found = compared(answers(kind == "dpo"), config(kind, loss, divergence))
    exact = 1e-6 if kind == "orpo" else 1e-9  # which TRL computes in float32
    assert found.terms[loss].item() == pytest.approx(CASES[case]["loss"], rel=exact)
    for name in ("chosen", "rejected"):
        assert getattr(found, name).tolist() == pytest.approx(CASES[case][name], rel=exact)


def test_every_loss_has_a_flag_and_a_case() -> None:
    assert {*DPO_LOSSES} == {*flags.DPO_LOSSES} == {*theirs.DPO_LOSSES}
    assert {case.split()[1] for case in CASES} == {*DPO_LOSSES, *flags.CPO_LOSSES, "odds"}


def test_terms_are_weighted_and_add_up() -> None:
    both = replace(config("dpo", "sigmoid"), loss_type=["sigmoid", "sft"], loss_weights=[0.8, 2.0])
    found = compared(answers(), replace(both, rpo_alpha=0.5))
    nll = -sum(theirs.CHOSEN) / sum(theirs.TOKENS["chosen"])
    alone = compared(answers(), config("dpo", "sigmoid")).loss.item()
    expected = {"sigmoid": 0.8 * alone, "sft": 2 * nll, "rpo": 0.5 * nll}
    assert {name: one.item() for name, one in found.terms.items()} == pytest.approx(expected)
    assert found.loss.item() == pytest.approx(sum(expected.values()))


@pytest.mark.parametrize("kind", ["cpo", "simpo", "orpo"])
def test_chosen_answers_are_learned_too(kind: str) -> None:
    own = replace(config(kind, "simpo" if kind == "simpo" else "sigmoid"), cpo_alpha=1.0)
    nll = -sum(theirs.CHOSEN) / sum(theirs.TOKENS["chosen"])
    assert compared(answers(), own).terms["nll"].item() == pytest.approx(nll)
