"""Several trainer processes: ranks, the first cause of a failure, signals. Real processes, no model."""

import json
import signal
from pathlib import Path

import pytest

from tests import forks
from tests.conftest import until

WORKER = """
import os, signal, sys, time
rank, mode = os.environ["RANK"], sys.argv[1]
if mode == "ok":
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    open("world" + rank, "w").write(" ".join(os.environ[name] for name in names))
    sys.exit(0)
def save(number, frame):
    open("saved" + rank, "w").write(str(number))
    if mode == "hangs" and rank == "1":
        time.sleep(100)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
if rank == "1" and mode == "exit":
    sys.exit(3)
if mode == "aborts after the end" and rank == "0":
    open("summary.json", "w").write('{"exit_code": 0}')
    sys.exit(0)
if mode == "aborts after the end":
    while "exit_code" not in open("summary.json").read():
        time.sleep(0.01)
    os.abort()
if rank == "1" and mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
open("ready" + rank, "w")
time.sleep(100)
"""

LAUNCH = """
import sys
from pathlib import Path
from swift_r1.flags import World
from swift_r1.launch.elastic import run_workers
mode, patience, summary = sys.argv[1], int(sys.argv[2]), Path("summary.json")
summary.write_text("of the run before")
command = sys.executable, "worker.py", mode
sys.exit(run_workers(World(nproc_per_node=2), command, lambda: "what helps", patience, summary))
"""


def launch(folder: Path, mode: str, patience: int = 0) -> forks.ForkedProcess:
    """The launcher has its imports; its workers start cold."""
    (folder / "worker.py").write_text(WORKER)
    (folder / "launch.py").write_text(LAUNCH)
    with (folder / "said").open("w") as said:
        words = ["launch.py", mode, str(patience)]
        return forks.start(words, cwd=folder, stdout=forks.DEVNULL, stderr=said)


def end(folder: Path, process: forks.ForkedProcess) -> tuple[int, str]:
    try:
        code = process.wait(60)
    finally:
        process.kill()
    return code, (folder / "said").read_text()


def test_every_rank_runs_and_knows_the_world(tmp_path: Path) -> None:
    code, err = end(tmp_path, launch(tmp_path, "ok"))
    assert (code, err) == (0, "")
    assert (tmp_path / "world0").read_text() == "0 0 2 127.0.0.1"
    assert (tmp_path / "world1").read_text() == "1 1 2 127.0.0.1"


@pytest.mark.parametrize(
    ("mode", "code", "lines"),
    [
        pytest.param(
            "exit",
            3,
            ["swift rlhf: rank 1 was the first to end: exit code 3"],
            marks=pytest.mark.long,
        ),
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
def test_the_first_failure_is_the_runs(
    tmp_path: Path, mode: str, code: int, lines: list[str]
) -> None:
    found, err = end(tmp_path, launch(tmp_path, mode))
    assert found == code
    assert err.splitlines() == lines


def signalled(folder: Path, number: signal.Signals, mode: str, **more: int) -> forks.ForkedProcess:
    """A launch whose workers wait, and have all taken the signal."""
    process = launch(folder, mode, **more)
    until(lambda: all((folder / f"ready{rank}").exists() for rank in "01"))
    process.send_signal(number)
    until(lambda: all((folder / f"saved{rank}").exists() for rank in "01"))
    return process


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)],
)
def test_signals_reach_the_workers_which_may_save(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    found, err = end(tmp_path, signalled(tmp_path, number, "wait"))
    assert found == code
    assert err == (
        f"swift rlhf: {number.name}: waiting for the ranks to end, as long as they make progress; "
        "once more ends them at once\n"
    )
    assert [(tmp_path / f"saved{rank}").read_text() for rank in "01"] == [str(number.value)] * 2


@pytest.mark.long
def test_a_rank_that_does_not_end_is_killed_after_shutdown_timeout(tmp_path: Path) -> None:
    code, err = end(tmp_path, signalled(tmp_path, signal.SIGTERM, "hangs", patience=1))
    assert code == 143
    assert "at most 1 s (--shutdown_timeout)" in err


@pytest.mark.long
def test_a_second_signal_ends_the_ranks_at_once(tmp_path: Path) -> None:
    process = signalled(tmp_path, signal.SIGTERM, "hangs")
    process.send_signal(signal.SIGTERM)
    assert end(tmp_path, process)[0] == 143


@pytest.mark.long
def test_a_rank_that_aborts_after_the_summary_does_not_fail_the_run(tmp_path: Path) -> None:
    code, err = end(tmp_path, launch(tmp_path, "aborts after the end"))
    assert code == 0
    assert (
        err
        == "swift rlhf: rank 1 was killed by SIGABRT after the run was done, which does not fail it\n"
    )


def test_of_ranks_that_fail_together_the_telling_code_wins() -> None:
    """Losing a peer ends a rank with a traceback (1); the peer's own exit code says why."""
    from torch.distributed.elastic.multiprocessing.api import ProcessFailure

    from swift_r1.launch.elastic import first_cause

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

    from swift_r1.errors import EXIT_LOST_PEER
    from swift_r1.launch.elastic import first_cause

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


LISTENS = """
import json, os, psutil
import torch.distributed as dist
from swift_r1.runtime.ranks import join_ranks
ranks = join_ranks(60, True)
dist.barrier()
seen = [one.laddr for pid in (os.getpid(), os.getppid()) for one in psutil.Process(pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN]
open("listens" + os.environ["RANK"], "w").write(json.dumps([seen, os.environ["MASTER_PORT"]]))
dist.barrier()
os._exit(0)
"""


def test_the_ranks_of_one_machine_listen_on_loopback_alone(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(LISTENS)
    (tmp_path / "launch.py").write_text(LAUNCH)
    done = forks.run(["launch.py", "ok", "0"], cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in "01":
        seen, port = json.loads((tmp_path / f"listens{rank}").read_text())
        assert {host for host, _ in seen} == {"127.0.0.1"} and [
            host for host, own in seen if str(own) == port
        ]
