"""Several trainer processes: ranks, the first cause of a failure, signals. Real processes, no model."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

WORKER = """
import os, signal, sys, time
rank, mode = os.environ["RANK"], sys.argv[1]
if mode == "ok":
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    open("world" + rank, "w").write(" ".join(os.environ[name] for name in names))
    sys.exit(0)
def save(number, frame):
    open("saved" + rank, "w").write(str(number))
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
if rank == "1" and mode == "exit":
    sys.exit(3)
if rank == "1" and mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
open("ready" + rank, "w")
time.sleep(100)
"""

LAUNCH = """
import sys
from swift_r1.arguments import World
from swift_r1.cli.elastic import run_workers
sys.exit(run_workers(World(nproc_per_node=2), (sys.executable, "worker.py", sys.argv[1]), 8, lambda: "what helps"))
"""


LAUNCH_BESIDE = """
import subprocess, sys
beside = subprocess.Popen(["sleep", "100"], start_new_session=True)
try:
    from swift_r1.arguments import World
    from swift_r1.cli.elastic import run_workers
    run_workers(World(nproc_per_node=2), (sys.executable, "worker.py", sys.argv[1]), 8)
    open("beside", "w").write(str(beside.poll()))
finally:
    beside.kill()
"""


def launch(folder: Path, mode: str, script: str = LAUNCH) -> subprocess.Popen[str]:
    (folder / "worker.py").write_text(WORKER)
    return subprocess.Popen(
        [sys.executable, "-c", script, mode],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, err


def test_every_rank_runs_and_knows_the_world(tmp_path: Path) -> None:
    code, err = end(launch(tmp_path, "ok"))
    assert (code, err) == (0, "")
    assert (tmp_path / "world0").read_text() == "0 0 2 127.0.0.1"
    assert (tmp_path / "world1").read_text() == "1 1 2 127.0.0.1"


@pytest.mark.parametrize("mode", ["ok", "exit"])
def test_what_was_started_before_the_ranks_outlives_them(tmp_path: Path, mode: str) -> None:
    """As the keeper of engines beside them must."""
    end(launch(tmp_path, mode, LAUNCH_BESIDE))
    assert (tmp_path / "beside").read_text() == "None"


@pytest.mark.parametrize(
    ("mode", "code", "lines"),
    [
        ("exit", 3, ["swift rlhf: rank 1 was the first to end: exit code 3"]),
        (
            "killed",
            5,
            [
                "swift rlhf: rank 1 was the first to end: killed by SIGKILL (likely out of memory)",
                "swift rlhf: what helps",
            ],
        ),
    ],
)
def test_the_first_failure_is_the_runs(tmp_path: Path, mode: str, code: int, lines: list[str]) -> None:
    found, err = end(launch(tmp_path, mode))
    assert found == code
    assert err.splitlines() == lines


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_workers_which_may_save(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = launch(tmp_path, "wait")
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"ready{rank}").exists() for rank in "01"):
        assert time.monotonic() < deadline and process.poll() is None, "the workers did not start"
        time.sleep(0.05)
    process.send_signal(number)
    assert end(process) == (code, "")
    assert [(tmp_path / f"saved{rank}").read_text() for rank in "01"] == [str(number.value)] * 2


def test_of_ranks_that_fail_together_the_telling_code_wins() -> None:
    """Losing a peer ends a rank with a traceback (1); the peer's own exit code says why."""
    from torch.distributed.elastic.multiprocessing.api import ProcessFailure

    from swift_r1.cli.elastic import first_cause

    def failure(rank: int, code: int) -> ProcessFailure:
        one = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        one.timestamp = 7
        return one

    assert first_cause({0: failure(0, 1), 1: failure(1, 3)}) == (1, 3, "exit code 3")
    assert first_cause({0: failure(0, 5), 1: failure(1, -9)})[:2] == (1, 5)
    assert first_cause({0: failure(0, 5), 1: failure(1, -signal.SIGTERM)}) == (0, 5, "exit code 5")
    assert first_cause({0: failure(0, -signal.SIGTERM)}) == (0, 143, "SIGTERM")


def test_losing_a_peer_is_no_first_cause() -> None:
    from torch.distributed.elastic.multiprocessing.api import ProcessFailure

    from swift_r1.cli.elastic import first_cause
    from swift_r1.errors import EXIT_LOST_PEER

    def failure(rank: int, code: int, time: int) -> ProcessFailure:
        one = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        one.timestamp = time
        return one

    lost = failure(0, EXIT_LOST_PEER, 7)
    assert first_cause({0: lost, 1: failure(1, 1, 8)}) == (1, 1, "exit code 1")
    assert first_cause({0: lost, 1: failure(1, -signal.SIGKILL, 8)})[:2] == (1, 5)
    # Half of --ddp_timeout later it is the launcher that kills.
    assert first_cause({0: lost, 1: failure(1, -signal.SIGKILL, 17)})[:2] == (0, EXIT_LOST_PEER)
    assert first_cause({0: lost, 1: failure(1, -signal.SIGTERM, 7)})[0] == 0
