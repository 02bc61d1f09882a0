"""SIGTERM and Ctrl-C: the run ends in order, with a checkpoint, and says so by its exit code."""

import json
import os
import signal
import time

import pytest

from swift_r1.training.checkpoint.folder import list_checkpoints
from tests.conftest import wait_until_gone
from tests.e2e.live_run import PLUGIN, LiveRun, words_of


@pytest.mark.parametrize(
    ("number", "code", "cold"),
    [
        pytest.param(signal.SIGTERM, 143, False, marks=pytest.mark.long),
        (signal.SIGINT, 130, False),
        pytest.param(signal.SIGINT, 130, True, marks=pytest.mark.long),
    ],
)
def test_a_signal_saves_and_ends(tiny_model, tmp_path, number, code, cold):
    run_dir = tmp_path / "run"
    flags = {"dataset": "counting#50", "per_device_train_batch_size": 4, "max_completion_length": 8}
    flags |= {"reward_isolation": "process" if number == signal.SIGINT else "inline"}
    run = LiveRun(
        words_of(tiny_model, run_dir, max_steps=100_000, **flags),
        cold=cold,
    )

    def send(step):
        if step == 2:
            # To the whole group, as a terminal's Ctrl-C.
            os.killpg(run.process.pid, number)

    try:
        assert run.follow(send, 200) == code, run.said
    finally:
        run.close()
    (checkpoint,) = list_checkpoints(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (
        checkpoint.name == f"checkpoint-{summary['steps']}"
        and (checkpoint / "model.safetensors").exists()
    )
    assert run.said.count("stopping after this step") == 1
    assert f"with --resume_from_checkpoint last goes on after step {summary['steps']}" in run.said


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_the_first_step_ends_at_once(
    tiny_model, tmp_path, monkeypatch, number, code, processes
):
    """Rank 0 takes for ever to load; the other one waits for it in a collective, in C++."""
    plugin = PLUGIN.with_name("waiting_plugin.py")
    monkeypatch.setenv("WAITING_PLUGIN", str(tmp_path / "loads"))
    flags = {"deepspeed": "zero2", "per_device_train_batch_size": 8} if processes > 1 else {}
    flags |= {"reward_isolation": "process"}
    run = LiveRun(
        words_of(tiny_model, tmp_path / "run", external_plugins=[PLUGIN, plugin], **flags),
        processes,
        cold=True,
    )
    end_while_it_loads(run, number, code, lambda: (tmp_path / "loads").exists())


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_engine_beside_the_trainer_loads(tiny_model, tmp_path, number, code):
    flags = {
        "use_vllm": "true",
        "vllm_mode": "colocate",
        "torch_dtype": "float32",
        "vllm_server_timeout": 300,
    }
    run = LiveRun(words_of(tiny_model, tmp_path / "run", **flags), cold=True)
    end_while_it_loads(
        run, number, code, lambda: any("EngineCore" in one.name() for one in run.traces.look())
    )


def end_while_it_loads(run, number, code, loads):
    """Within 5 s the run has ended, and nothing is left of it."""
    try:
        deadline = time.monotonic() + 120
        while not loads():
            assert run.process.poll() is None and time.monotonic() < deadline, (
                run.process.returncode
            )
            time.sleep(0.05)
        run.traces.look()
        run.process.send_signal(number)
        assert run.process.wait(5) == code
        wait_until_gone(run.traces.processes)
        assert run.traces.left(0) == []
    finally:
        run.close()
