"""The algorithm's flags through `swift rlhf`: each leaves its trace in the log, on one process and on two."""

import json
import math
import shutil

import pytest

from tests.e2e.live_run import PLUGIN


@pytest.mark.long
def test_flags_of_the_loss_and_its_inputs(rlhf, tiny_model):
    """Everything that one run can hold at once; completions of 3 tokens, so that many groups have no signal."""
    run = rlhf(
        tiny_model,
        max_steps=4,
        max_completion_length=3,
        learning_rate=1e-2,
        beta=0.1,
        kl_in_reward="true",
        loss_type="sapo",
        tau_pos=0.9,
        tau_neg=1.2,
        advantage_estimator="reinforce_plus_plus_baseline",
        top_entropy_quantile=0.5,
        rollout_importance_sampling_mode="token_truncate",
        rollout_importance_sampling_threshold=1.5,
        dynamic_sample="true",
        max_resample_times=2,
        sync_ref_model="true",
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=1.0,
        packing="true",
    )
    assert run.code == 0
    steps = run.steps
    assert [line["ref_model_synced"] for line in steps] == [0, 1, 0, 1]
    # The reference is the policy again after steps 2 and 4, and was it at the start.
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6) and steps[2]["kl"] == pytest.approx(
        0, abs=1e-6
    )
    assert steps[1]["kl"] > 1e-5 and steps[1]["kl_penalty"] != 0
    assert steps[0]["kl_penalty"] == pytest.approx(0, abs=1e-6)
    for line in steps:
        assert line["entropy/threshold"] > 0
        assert (
            line["rollout/weight"] == pytest.approx(1, abs=1e-3)
            and line["rollout/weight_over_threshold"] == 0
        )
        assert line["rollout/logp_diff"] < 1e-3
    assert_resampling_adds_up(run, prompts_per_round=2, most=4)


def test_two_processes_resample_together(rlhf, tiny_model):
    run = rlhf(
        tiny_model,
        processes=2,
        external_plugins=[PLUGIN, PLUGIN.with_name("unquiet_plugin.py")],
        deepspeed="zero2",
        per_device_train_batch_size=4,
        max_steps=3,
        max_completion_length=3,
        learning_rate=1e-3,
        loss_type="cispo",
        dynamic_sample="true",
        overlong_filter="true",
        advantage_estimator="rloo",
        packing="true",
    )
    assert run.code == 0
    assert "at work" in run.errors
    assert "cispo caps the importance ratio at 5 (--epsilon_high)" in run.errors
    assert json.loads((run.folder / "args.json").read_text())["args"]["scale_rewards"] == "none"
    assert_resampling_adds_up(run, prompts_per_round=2, most=6)
    # Nearly all completions of 3 tokens are truncated: what is trained is far less than what was generated.
    for line in run.steps:
        assert line["completions/clipped_ratio"] > 0.5
        assert ("entropy" in line) == any(
            row["finish_reason"] == "stop" for row in trained(run) if row["step"] == line["step"]
        )


def trained(run):
    return [row for row in run.lines("completions.jsonl") if not row.get("dropped")]


def assert_resampling_adds_up(run, prompts_per_round, most):
    rows = run.lines("completions.jsonl")
    assert len({row["request_id"] for row in rows}) == len(rows) / 4, "each prompt is asked once"
    for line in run.steps:
        own = [row for row in rows if row["step"] == line["step"]]
        dropped = [row for row in own if row.get("dropped")]
        groups = {}
        for row in own:
            if not row.get("dropped"):
                groups.setdefault(row["group"], []).append(row["reward"])
        assert [len(rewards) for rewards in groups.values()] == [4] * prompts_per_round
        assert len(dropped) == 4 * line["dynamic_sample/resampled"]
        assert all(row["advantage"] is None for row in dropped)
        silent = sum(len(set(rewards)) == 1 for rewards in groups.values())
        assert silent == line["dynamic_sample/kept_without_signal"]
        assert line["dynamic_sample/resampled"] <= most
        if silent:
            assert line["dynamic_sample/resampled"] >= most / prompts_per_round, (
                "given up only at the cap"
            )
        assert line["reward"] == pytest.approx(sum(row["reward"] for row in own) / len(own))
    assert any(line["dynamic_sample/resampled"] for line in run.steps)


def test_experts_answers_are_learned_and_a_resumed_run_learns_the_same(rlhf, tiny_model, tmp_path):
    """CHORD beside FIPO over several optimizer steps of a round; killed in the middle of one."""
    rows = [
        {"query": f"count from {number}", "response": f"{number} then more"} for number in range(7)
    ]
    (tmp_path / "experts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"query": "none"}])
    )
    flags = {
        "max_steps": 6,
        "save_steps": 3,
        "learning_rate": 3e-3,
        "num_iterations": 2,
        "deterministic": "true",
        "loss_type": "fipo",
        "fipo_clip_high_only": "false",
        "chord_sft_dataset": str(tmp_path / "experts.jsonl"),
        "chord_sft_per_device_train_batch_size": 4,
        "chord_mu_warmup_steps": 1,
        "chord_mu_decay_steps": 4,
        "chord_mu_peak": 0.8,
        "chord_mu_valley": 0.1,
    }
    run = rlhf(tiny_model, **flags)
    assert run.code == 0 and "1 of 8 rows left out" in run.errors and "no answer" in run.errors
    steps = run.steps
    assert [line["chord/mu"] for line in steps] == pytest.approx(
        [0, 0.8, 0.697487, 0.45, 0.202513, 0.1], abs=1e-5
    )
    assert "chord/nll" not in steps[0] and steps[5]["chord/nll"] < steps[1]["chord/nll"] - 0.1
    assert steps[0]["fipo/influence_weight"] == 1 and steps[1]["fipo/influence_weight"] != 1

    shutil.rmtree(run.folder / "checkpoint-6")
    again = rlhf(tiny_model, **flags, resume_from_checkpoint="last")
    assert again.code == 0
    times = {name for name in steps[5] if name.startswith(("time/", "memory/")) or "second" in name}
    for line, expected in zip(again.steps, steps, strict=True):
        assert {k: v for k, v in line.items() if k not in times} == {
            k: v for k, v in expected.items() if k not in times
        }


def test_groups_of_real(rlhf, tiny_model):
    """In the first step of a round the policy has not moved, and the loss is known: log(1 + p) + log(1 + n)."""
    run = rlhf(
        tiny_model,
        max_steps=4,
        learning_rate=3e-3,
        num_iterations=2,
        loss_type="real",
        advantage_estimator="rloo",
    )
    assert run.code == 0
    first = [row for row in run.lines("completions.jsonl") if row["step"] == 1]
    groups = [[row["advantage"] for row in first[start : start + 4]] for start in range(0, 8, 4)]
    expected = (
        sum(math.log1p(labels.count(1)) + math.log1p(labels.count(-1)) for labels in groups) / 2
    )
    assert expected > 0 and {label for labels in groups for label in labels} <= {-1, 0, 1}
    assert run.steps[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert run.steps[1]["loss"] < run.steps[0]["loss"]
