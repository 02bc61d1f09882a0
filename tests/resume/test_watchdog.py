"""A run that hangs ends with exit code 5 and says where every rank stood."""

from __future__ import annotations

import json
import signal

import pytest

from tests.resume.conftest import happened


@pytest.mark.parametrize(
    ("ranks", "count", "seconds"),
    [
        ({}, 1, 8),
        pytest.param({"processes": 2, "deepspeed": "zero2"}, 2, 30, marks=pytest.mark.long),
    ],
)
def test_a_run_that_hangs_shows_its_stacks_and_ends(runs, tmp_path, ranks, count, seconds):
    (tmp_path / "signals.json").write_text(
        json.dumps({"step": 1, "signal": signal.SIGCONT, "times": 1})
    )
    (tmp_path / "hang").touch()
    flags = {"max_steps": 4, "save_steps": 1, "step_timeout": seconds, "num_generations": 8} | ranks
    ended = runs.run(tmp_path / "run", per_device_train_batch_size=8 // count, **flags)
    assert ended.code == 5
    # The others hear that rank 0 is alive: it is rank 0 that shows why nothing goes on.
    assert f"rank 0 made no progress for {seconds} s (--step_timeout) in the rewards" in ended.said
    assert 'noisy_plugin.py"' in ended.said and "in __call__" in ended.said
    assert (tmp_path / "run" / "checkpoint-1").exists()
    kinds = [(kind, text[:20]) for kind, _, text in happened(tmp_path / "run")]
    assert kinds[-1] == ("failed", "rank 0 made no progr")


def test_without_a_limit_nothing_ends(runs, tmp_path):
    assert runs.run(tmp_path / "run", max_steps=2, step_timeout=0).code == 0
