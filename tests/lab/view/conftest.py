"""`swift view` as a user starts it, and Debian's Chromium to look at its pages."""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests import forks
from tests.conftest import free_port

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
)
_START_S = 60


@dataclass
class Viewer:
    """A `swift view` that serves."""

    url: str
    said: str
    process: subprocess.Popen[str] | forks.ForkedProcess

    def end(self, number: int = signal.SIGINT, within_s: float = 60.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(within_s)


@pytest.fixture
def viewer(tmp_path: Path) -> Iterator[Callable[..., Viewer]]:
    """`viewer(run, ..., environ={}, cold=False) -> Viewer`: starts it in an empty folder, and ends it with the test;
    `cold` pays for the imports."""
    started: list[subprocess.Popen[str] | forks.ForkedProcess] = []

    def start(*words: object, environ: dict[str, str] | None = None, cold: bool = False) -> Viewer:
        folder = tmp_path / "where it is started"
        folder.mkdir(exist_ok=True)
        command = ["-m", "swift_r1", "view", *map(str, words), "--port", str(free_port())]
        process: subprocess.Popen[str] | forks.ForkedProcess
        if cold:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env=os.environ | (environ or {}),
                stdout=subprocess.PIPE,
                text=True,
            )
        else:
            process = forks.start(command, cwd=folder, environ=environ, stdout=forks.PIPE)
        started.append(process)
        line = first_line(process)
        found = re.search(r"http://\S+?(?=[; ])", line)
        assert found, line
        return Viewer(found[0], line, process)

    yield start
    for process in started:
        process.kill()
        process.wait(60)


def first_line(
    process: subprocess.Popen[str] | forks.ForkedProcess, within_s: float = _START_S
) -> str:
    """The first line that a process prints."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        assert waiting.select(within_s), "it has printed nothing"
    return process.stdout.readline()


# while it is there, no other test of the process can run an event loop
@pytest.fixture(scope="module")
def playwright() -> Iterator[Any]:
    """What starts browsers."""
    found = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with found.sync_playwright() as running:
        yield running


@pytest.fixture(scope="module")
def chromium(playwright: Any) -> Iterator[Any]:
    """A browser, without a screen."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
    yield browser
    browser.close()


@pytest.fixture
def tab(chromium: Any) -> Iterator[Callable[..., Any]]:
    """`tab(width=1280, theme="light") -> Page` of Playwright. Whatever it asks for must be on this machine, and, if
    `calm`, its console must stay without warnings."""
    contexts, faults = [], []

    def look_at(request: Any) -> None:
        if (
            urlsplit(request.url).scheme not in ("data", "blob")
            and urlsplit(request.url).hostname != "127.0.0.1"
        ):
            faults.append(f"asked for {request.url}")

    def open_tab(width: int = 1280, theme: str = "light", calm: bool = True) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
        contexts.append(context)
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.on("request", look_at)
        if calm:
            page.on(
                "console",
                lambda said: (
                    faults.append(said.text) if said.type in ("error", "warning") else None
                ),
            )
            page.on("pageerror", lambda error: faults.append(str(error)))
        return page

    yield open_tab
    for context in contexts:
        context.close()
    assert faults == []


def series(page: Any, title: str) -> dict[str, list[list[float | None]]]:
    """The points of a chart's lines by name, as the browser has them; of the bold one where there is a faint one."""
    found = page.evaluate(
        """(title) => {
          const place = [...document.querySelectorAll(".view-chart")].find((one) => one.ariaLabel === title);
          const chart = place && getElement(place.id.slice(1)).chart;
          const lines = chart?.getOption()?.series.filter((one) => one.type === "line");
          return lines?.map((one) => [one.name, one.data.map((point) => point.slice(0, 2))]);
        }""",
        title,
    )
    return {name: data for name, data in found or []}
