"""A whole run of a tiny model by one command: real trainer, real servers over a small engine."""

from __future__ import annotations

import json
import signal
import sys

import psutil
import pytest

from tests.conftest import until, wait_until_gone
from tests.fleet.conftest import Launch

TINY = f'[ "$3" = rollout ] && shift 3 && exec {sys.executable} -m tests.fleet.tiny_rollout "$@"'
SCRIPT = f'{TINY}\nexec {sys.executable} "$@"'


@pytest.mark.long
def test_a_run_whose_replica_and_trainer_are_killed(tmp_path, write_run, interpreter, tiny_model):
    rlhf = {"max_steps": 8, "save_steps": 2, "output_dir": "run", "add_version": False}
    roles = {"train": {}, "rollout": {"replicas": 2}}
    write_run(roles, model=tiny_model, rlhf=rlhf, local={"python": interpreter(SCRIPT)})
    one = Launch(tmp_path, [])
    try:
        log = tmp_path / "run" / "logging.jsonl"

        def process(words: str) -> psutil.Process:
            return until(
                lambda: next(
                    (each for each in one.below() if words in " ".join(each.cmdline())), None
                )
            )

        until(
            lambda: (tmp_path / "run" / "checkpoint-2").exists() or one.process.poll() is not None,
            120,
        )
        process("tests.fleet.tiny_rollout").send_signal(signal.SIGKILL)
        trainer = process("swift_r1.cli.rank")
        trainer.send_signal(signal.SIGKILL)
        assert one.wait(150) == 0, one.said
    finally:
        one.stop()
    steps = [
        line["step"] for line in map(json.loads, log.read_text().splitlines()) if "loss" in line
    ]
    assert sorted(set(steps)) == list(range(1, 9))
    assert "train-0 on local was killed by SIGKILL" in one.said
    assert "it comes back" in one.said
    assert (tmp_path / "run" / "launch" / "train-0.log").read_text().count("start ") >= 2
    wait_until_gone(one.seen.values(), 1)
