"""SIGTERM and Ctrl-C: the run ends in order, with a checkpoint, and says so by its exit code."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from swift_r1.training.checkpoints import list_checkpoints


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends(tiny_model, tmp_path, number, code):
    run_dir = tmp_path / "run"
    words = [
        *(sys.executable, "-m", "swift_r1", "rlhf", "--rlhf_type", "grpo", "--model", str(tiny_model)),
        *("--external_plugins", os.path.join(os.path.dirname(__file__), "digits_plugin.py")),
        *("--dataset", "counting#50", "--reward_funcs", "digits", "--num_generations", "4"),
        *("--per_device_train_batch_size", "4", "--max_completion_length", "8", "--max_steps", "100000"),
        *("--logging_steps", "1", "--report_to", "none", "--output_dir", str(run_dir), "--add_version", "false"),
        *("--dataloader_num_workers", "1"),
    ]
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    watchdog = threading.Timer(200, process.kill)
    watchdog.start()
    try:
        # Off a terminal each step is a line, so this waits for the second step and nothing else.
        for line in process.stderr:
            if line.startswith("step 2/"):
                # To the whole group, as a terminal's Ctrl-C.
                os.killpg(process.pid, number)
                break
        errors = process.stderr.read()
        assert process.wait(60) == code, errors
    finally:
        watchdog.cancel()
        process.kill()
    (checkpoint,) = list_checkpoints(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert checkpoint.name == f"checkpoint-{summary['steps']}" and (checkpoint / "model.safetensors").exists()
    assert errors.count("stopping after this step") == 1
