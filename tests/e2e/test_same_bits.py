"""`--batch_invariant true`: the trainer's log-probs are the engine's to the bit, in whole runs."""

from __future__ import annotations

import pytest

from tests.families import save_family

ROUNDS = {
    "max_steps": 3,
    "steps_per_generation": 2,
    "num_iterations": 1,
    "learning_rate": 1e-2,
    "max_completion_length": 24,
}


def differences(run):
    assert run.code == 0, run.errors[-3000:]
    return [line["rollout/logp_diff"] for line in run.steps]


def test_log_probs_differ_by_nothing(rlhf, tmp_path):
    """In both updates of a round and the first of the next; without the flag they do."""
    model = save_family(tmp_path / "model", "qwen3_moe")
    ours = rlhf(model, batch_invariant="true", **ROUNDS)
    assert differences(ours) == [0.0] * 3
    assert ours.steps[0]["ratio"] == 1.0 and ours.steps[0]["grad_norm"] > 0
    plain = rlhf(model, output_dir=tmp_path / "plain", **ROUNDS | {"max_steps": 1})
    assert min(differences(plain)) > 0


@pytest.mark.parametrize(
    ("family", "flags", "why"),
    [
        ("qwen2", {"top_p": 0.9}, "completions have other log-probs than the policy's"),
        ("qwen2", {"train_type": "lora", "lora_dropout": 0.1}, "trained with dropout and samples"),
        ("qwen3_moe", {"router_replay_mode": "R3"}, "chooses the same experts anyway"),
        ("gemma2", {}, "Gemma2ForCausalLM has layers or attention of another kind"),
    ],
)
def test_what_cannot_be_so_is_refused(rlhf, tmp_path, family, flags, why):
    run = rlhf(
        save_family(tmp_path / "model", family), batch_invariant="true", max_steps=1, **flags
    )
    assert run.code == 2 and "--batch_invariant true" in run.errors and why in run.errors
