"""Completions from another distribution than the policy's, and what the log says of it."""

import math

import pytest


def test_what_is_logged_of_entropies_and_of_the_gap(rlhf, tiny_model):
    flags = {
        "log_entropy": "true",
        "log_rollout_offpolicy_metrics": "true",
        "off_policy_sequence_mask_delta": 0.01,
    }
    run = rlhf(tiny_model, max_steps=4, num_iterations=4, learning_rate=1e-2, **flags)
    assert run.code == 0
    rows, steps = run.lines("completions.jsonl"), run.steps
    entropies = [row["entropy"] for row in rows]
    tokens = [len(row["completion"]) for row in rows]
    assert (
        len(set(entropies)) == len(rows) == 8
        and all(0 < one < 5 for one in entropies)
        and min(tokens)
    )
    assert steps[0]["entropy/max"] == pytest.approx(max(entropies))
    assert steps[0]["entropy/min"] == pytest.approx(min(entropies))
    assert min(entropies) < steps[0]["entropy"] < max(entropies)
    assert steps[0]["rollout/kl"] == pytest.approx(0, abs=1e-4)
    assert steps[0]["rollout/ppl_ratio"] == pytest.approx(1, abs=1e-3)
    assert steps[0]["rollout/off_policy_masked"] == 0 < steps[-1]["rollout/off_policy_masked"] < 1


@pytest.mark.parametrize(("flag", "value"), [("min_p", 0.3), ("repetition_penalty", 3.0)])
def test_ratios_are_the_policys_own(rlhf, tiny_model, flag, value):
    run = rlhf(tiny_model, max_steps=1, max_completion_length=40, **{flag: value})
    assert run.code == 0
    [step] = run.steps
    assert step["ratio"] == 1 and step["rollout/logp_diff"] > 0.1
    kept = step.get("rollout/kept_mass", math.nan)
    assert 0.3 < kept < 0.95 if flag == "min_p" else math.isnan(kept)
    assert ("the engine samples from the penalised distribution" in run.errors) == (
        flag == "repetition_penalty"
    )
