"""Completions from another distribution than the policy's, and what the log says of it."""

import math

import pytest


@pytest.mark.parametrize(("flag", "value"), [("min_p", 0.3), ("repetition_penalty", 3.0)])
def test_ratios_are_the_policys_own(rlhf, tiny_model, flag, value):
    run = rlhf(tiny_model, max_steps=1, max_completion_length=40, **{flag: value})
    assert run.code == 0
    [step] = run.steps
    assert step["ratio"] == 1 and step["rollout/logp_diff"] > 0.1
    kept = step.get("rollout/kept_mass", math.nan)
    assert 0.3 < kept < 0.95 if flag == "min_p" else math.isnan(kept)
    assert ("the engine samples from the penalised distribution" in run.errors) == (flag == "repetition_penalty")
