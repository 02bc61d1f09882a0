"""A rank of two that dies, or stops, in a real run on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
DDP_TIMEOUT = 20


@pytest.fixture
def training(tiny_model, tmp_path):
    """A run of two ranks that has taken a step: its process, the process ids of its ranks, and its log."""
    values = {
        "rlhf_type": "grpo",
        "model": tiny_model,
        "external_plugins": HERE / "digits_plugin.py",
        "dataset": "counting#200",
        "reward_funcs": "digits",
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "gradient_checkpointing": "false",
        "logging_steps": 1,
        "report_to": "none",
        "max_steps": 100_000,
        "output_dir": tmp_path / "run",
        "add_version": "false",
        "deepspeed": "zero3",
        "ddp_timeout": DDP_TIMEOUT,
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "swift_r1", "rlhf", *words],
            cwd=tmp_path,
            env=os.environ | {"NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, started_ranks(process, tmp_path / "run" / "logging.jsonl", log), log
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(process.pid).children(recursive=True):
                one.kill()
        process.kill()
        process.wait(20)
        print(log.read_text())


def started_ranks(process: subprocess.Popen[bytes], logged: Path, log: Path) -> list[int]:
    """Process ids of ranks 0 and 1, once a step is logged."""
    deadline = time.monotonic() + 250
    while '"loss"' not in _text(logged):
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.1)
    ranks = {}
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if b"swift_r1.cli.rank" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            continue
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks |= {entry: int(pid) for entry in environ if entry.startswith(b"RANK=")}
    return [ranks[b"RANK=0"], ranks[b"RANK=1"]]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for_the_end(pids: list[int], within: float) -> None:
    """Fails where one of the ranks is still there after `within` seconds."""
    deadline = time.monotonic() + within
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids):
        assert time.monotonic() < deadline, f"ranks did not end within {within} s"
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run(training, rank):
    process, pids, log = training
    os.kill(pids[rank], signal.SIGKILL)
    wait_for_the_end(pids, DDP_TIMEOUT)
    assert process.wait(60) == 5
    *_, cause, helps = log.read_text().splitlines()
    assert (
        cause
        == f"swift rlhf: rank {rank} was the first to end: killed by SIGKILL (likely out of memory)"
    )
    assert helps.startswith("swift rlhf: the largest part is ")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_stopped_rank_is_waited_for_no_longer_than_ddp_timeout(training):
    """Also in the groups that DeepSpeed makes; then the launcher ends the stopped rank."""
    process, pids, log = training
    os.kill(pids[1], signal.SIGSTOP)
    wait_for_the_end(pids, 2 * DDP_TIMEOUT)
    assert process.wait(60) == 5
    text = log.read_text()
    assert "swift rlhf: rank 0 lost another rank: " in text
    assert text.splitlines()[-1].startswith(
        "swift rlhf: rank 0 was the first to end: it lost another rank"
    )
