"""`--batch_invariant true`: the trainer's log-probs are the engine's to the bit, in whole runs."""

from __future__ import annotations

import pytest

from tests.families import save_family

SEVERAL_STEPS = {
    "max_steps": 3,
    "steps_per_generation": 2,
    "num_iterations": 1,
    "learning_rate": 1e-2,
    "max_completion_length": 24,
}


def differences(run):
    assert run.code == 0, run.errors[-3000:]
    return [line["rollout/logp_diff"] for line in run.steps]


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_log_probs_differ_by_nothing(rlhf, tmp_path, family):
    model = save_family(tmp_path / "model", family)
    ours = rlhf(model, batch_invariant="true", **SEVERAL_STEPS)
    assert differences(ours) == [0.0] * 3
    assert ours.steps[0]["ratio"] == 1.0 and ours.steps[-1]["grad_norm"] > 0
    if family == "qwen2":
        assert min(differences(rlhf(model, **SEVERAL_STEPS))) > 0
