"""A run folder as ms-swift 4.6 writes it: the same signs."""

from __future__ import annotations

import json
from pathlib import Path

from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.record.folder import find_runs
from tests.lab.runs.made import write_rows

# A line of a run of ms-swift 4.6.0, as it is.
LINE = json.loads(
    '{"loss": 2e-08, "grad_norm": 1.80389929, "learning_rate": 7.5e-07, "completions/mean_length": 79.4375, '
    '"completions/min_length": 17.0, "completions/max_length": 128.0, "completions/clipped_ratio": 0.375, '
    '"reward": 0.10333824, "reward_std": 0.10447001, "frac_reward_zero_std": 0.0, "rewards/Digits/mean": 0.10333824, '
    '"rewards/Digits/std": 0.10283686, "clip_ratio/low_mean": 0.0, "clip_ratio/low_min": 0.0, '
    '"clip_ratio/high_mean": 0.0, "clip_ratio/high_max": 0.0, "clip_ratio/region_mean": 0.0, '
    '"step_time": 58.33314391, "epoch": 0.33333333, "global_step/max_steps": "1/3", "elapsed_time": "1m 0s", '
    '"remaining_time": "2m 0s", "train_speed(s/it)": 59.985438}'
)


def test_signs(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(
        json.dumps({"rlhf_type": "grpo", "reward_funcs": ["digits"], "max_steps": 60})
    )
    silent = {
        "frac_reward_zero_std": 1.0,
        "rewards/Digits/mean": 0.0,
        "rewards/Digits/std": 0.0,
        "reward": 0.0,
    }
    lines = [LINE | silent | {"global_step/max_steps": f"{step}/60"} for step in range(5, 61, 5)]
    write_rows(
        tmp_path / "logging.jsonl",
        [*lines, {"model_parameter_info": "LlamaForCausalLM: 134.5150M Params"}],
    )
    [run] = find_runs([tmp_path])
    assert (run.status, run.args["reward_funcs"], run.plan["total_steps"]) == (
        "ended",
        ["digits"],
        60,
    )
    found = Diagnosis(tmp_path)
    found.refresh()
    assert list(found.findings) == ["no signal"]
    assert found.problems == ["logging.jsonl: 1 damaged line is left out"]
