"""What holds for the tests as a whole: required data, and an end that leaves nothing behind.

Skips for want of data become failures where `SWIFT_R1_REQUIRE_DATA=1` (continuous integration) is set. A skip counts as
one for want of data if the test carries the marker `data` or the reason names `SWIFT_R1_DATA`.

A process that tests have started and that outlives them fails the run: it would keep ports, memory and the run's output
open. So does a thread that keeps Python from ending. Where several processes run the tests (pytest-xdist), each looks
after its own, and the first one after what a crashed one has left.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import uuid
from collections.abc import Generator
from typing import Any

import psutil
import pytest

REQUIRED = os.environ.get("SWIFT_R1_REQUIRE_DATA") == "1"
MARK = "SWIFT_R1_TESTS"  # in the environment of all that tests start
LEFT = pytest.StashKey[list[str]]()
FORKS = pytest.StashKey[Any]()
GRACE_S = 15.0  # for what has been killed to be gone
WORKER_BYTES = 7 << 30  # pytest, a vLLM server, two ranks
EXIT_S = 120.0  # for Python to end
# Threads of tiny sums on a busy machine wait for each other twenty times longer than they compute. Here, since conftest
# files of folders that the command line names load torch before `pytest_configure`.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Half of the collection's time would go into looking for garbage among modules that stay.
gc.disable()
atexit.register(gc.unfreeze)  # else C++ modules complain of objects that outlive them


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport, marked: bool) -> None:
    if not (REQUIRED and report.skipped) or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if marked or "SWIFT_R1_DATA" in reason:
        report.outcome = "failed"
        report.longrepr = (
            f"data is required here (SWIFT_R1_REQUIRE_DATA=1), but this was skipped: {reason}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_if_skipped(report, item.get_closest_marker("data") is not None)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_if_skipped(report, False)
    return report


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    # A worker's mark begins with that of the process that has started it.
    os.environ[MARK] = f"{os.environ[MARK]}/{worker}" if worker else uuid.uuid4().hex
    config.stash[LEFT] = []
    if not worker:
        from tests.forks import ForkServer

        config.stash[FORKS] = ForkServer()
    # A shell has what it starts in the background ignore Ctrl-C, and with it all that tests start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: three where the machine has two processors, since tests wait too, and the memory for them; two with
    less memory; else none beside this process."""
    if len(os.sched_getaffinity(0)) < 2:
        return 0
    most = psutil.virtual_memory().total // WORKER_BYTES
    return min(3, most) if most >= 2 else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    from tests.scheduling import scope_of

    config.option.loadscopereorder = False  # tests come in the order in which they are to begin
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of
    return scheduler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.scheduling import put_in_order

        put_in_order(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker's end: what outlived its tests is the run's fault."""
    node.config.stash[LEFT] += getattr(node, "workeroutput", {}).get("left running", [])


def started_by_tests() -> list[psutil.Process]:
    """Processes that tests have started and that live, orphans too; Python's own helpers end with it."""
    children = psutil.Process().children()
    own = [one for one in children if "multiprocessing.resource_tracker" in " ".join(words_of(one))]
    return [
        one
        for one in psutil.process_iter()
        if one not in own and lives(one) and (one in children or is_marked(one))
    ]


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
    return False


def is_marked(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(MARK, "").startswith(os.environ[MARK])
    return False


def words_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if FORKS in session.config.stash:
        session.config.stash[FORKS].close()
    psutil.wait_procs(started_by_tests(), GRACE_S)
    left = session.config.stash[LEFT]
    for one in started_by_tests():
        left.append(f"{one.pid}: {' '.join(words_of(one))[:300]}")
        one.kill()
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left running"] = left
    elif left:
        for line in left:
            print(f"\nleft running by the tests: {line}", file=sys.__stderr__)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    faulthandler.dump_traceback_later(EXIT_S, exit=True, file=sys.__stderr__)
