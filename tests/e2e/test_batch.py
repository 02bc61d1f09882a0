"""Rounds whose size the flags leave open."""

import pytest


@pytest.mark.parametrize(
    ("flags", "count", "group"),
    [
        ({"num_generations": []}, 32, 8),
        (
            {
                "num_generations": 1,
                "advantage_estimator": "reinforce_plus_plus",
                "generation_batch_size": 4,
            },
            4,
            1,
        ),
        ({"num_generations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 4}, 8, 2),
    ],
)
def test_a_run(rlhf, tiny_model, flags, count, group):
    run = rlhf(tiny_model, max_steps=2, per_device_train_batch_size=[], **flags)
    assert run.code == 0
    rows = run.lines("completions.jsonl")
    assert len(rows) == count
    assert {
        sum(one["group"] == row["group"] and one["step"] == row["step"] for one in rows)
        for row in rows
    } == {group}
    assert any(row["advantage"] for row in rows)
    assert len(run.steps) == 2
