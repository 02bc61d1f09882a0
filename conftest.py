"""Skips for want of data become failures where `SWIFT_R1_REQUIRE_DATA=1` (continuous integration) is set.

A skip counts as one for want of data if the test carries the marker `data` or the reason names `SWIFT_R1_DATA`.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

REQUIRED = os.environ.get("SWIFT_R1_REQUIRE_DATA") == "1"


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
