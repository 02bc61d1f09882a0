"""What holds for the tests as a whole: required data, and an end that leaves nothing behind.

Skips for want of data become failures where `SWIFT_R1_REQUIRE_DATA=1` (continuous integration) is set. A skip counts as
one for want of data if the test carries the marker `data` or the reason names `SWIFT_R1_DATA`.

A process that tests have started and that outlives them fails the run: it would keep ports, memory and the run's output
open. So does a thread that keeps Python from ending.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import uuid
from collections.abc import Generator

import psutil
import pytest

REQUIRED = os.environ.get("SWIFT_R1_REQUIRE_DATA") == "1"
MARK = "SWIFT_R1_TESTS"  # in the environment of all that tests start
GRACE_S = 15.0  # for what has been killed to be gone
EXIT_S = 120.0  # for Python to end


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport, marked: bool) -> None:
    if not (REQUIRED and report.skipped) or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if marked or "SWIFT_R1_DATA" in reason:
        report.outcome = "failed"
        report.longrepr = f"data is required here (SWIFT_R1_REQUIRE_DATA=1), but this was skipped: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_if_skipped(report, item.get_closest_marker("data") is not None)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_if_skipped(report, False)
    return report


def pytest_configure() -> None:
    os.environ[MARK] = uuid.uuid4().hex


def started_by_tests() -> list[psutil.Process]:
    """Processes that tests have started and that live, orphans too; Python's own helpers end with it."""
    children = psutil.Process().children()
    own = [one for one in children if "multiprocessing.resource_tracker" in " ".join(words_of(one))]
    return [
        one for one in psutil.process_iter() if one not in own and lives(one) and (one in children or is_marked(one))
    ]


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
    return False


def is_marked(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(MARK) == os.environ[MARK]
    return False


def words_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    psutil.wait_procs(started_by_tests(), GRACE_S)
    if not (left := started_by_tests()):
        return
    for one in left:
        print(f"\nleft running by the tests: {one.pid}: {' '.join(words_of(one))[:300]}", file=sys.__stderr__)
        one.kill()
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    faulthandler.dump_traceback_later(EXIT_S, exit=True, file=sys.__stderr__)
