"""`swift view` as a process: how it starts, ends, and what it leaves alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_r1.cli.main import main
from tests.conftest import free_port, living, until, wait_until_gone
from tests.e2e.live_run import words_of
from tests.lab.runs.made import make_run
from tests.lab.view.conftest import Viewer, first_line, series


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "made", steps=4)


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of everything in a folder."""
    return {
        str(path): (one.st_size, one.st_mtime_ns)
        for path in (folder, *folder.rglob("*"))
        for one in [path.stat()]
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_while_a_browser_looks(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], made: Path, number: int
) -> None:
    before, shown = state(made), viewer(made, cold=number == signal.SIGINT)
    page = tab(calm=False)  # it will complain that its server is gone
    page.goto(shown.url)
    until(lambda: series(page, "Reward"))
    began = time.monotonic()
    assert shown.end(number) == 128 + number
    assert time.monotonic() - began < 4
    assert state(made) == before
    assert list((made.parent.parent / "where it is started").iterdir()) == []


def test_what_is_wrong_is_said_before_anything_is_loaded(
    viewer: Callable[..., Viewer], made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = viewer(made).url.rpartition(":")[2]
    for words, code, said in (
        ([made, "--port", port], 4, f"swift view: port {port} on 127.0.0.1 is taken"),
        ([tmp_path / "none"], 2, f"swift view: {tmp_path / 'none'}: there is no such folder"),
        (
            [made, "--host", "0.0.0.0"],
            2,
            "swift view: --host 0.0.0.0 accepts connections from other machines: set --api_key",
        ),
        (
            [made, "--trace", "t.pftrace", "--port", "1"],
            2,
            "swift view: --port has no effect without the page (--trace)",
        ),
        ([made, "--portt", "1"], 2, "swift view: unknown flag --portt: did you mean --port?"),
    ):
        assert main(["view", *map(str, words)]) == code
        error = capsys.readouterr().err
        assert (error.startswith(said), error.count("\n")) == (True, 1), error


def test_without_the_extra_one_line_says_how_to_get_it(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    for words in (
        ["view", str(made)],
        ["report", str(made)],
        ["rlhf", "--view", "true", *words_of(made, made)],
    ):
        assert main(words) == 2
        assert capsys.readouterr().err.endswith(
            ": duckdb not installed: pip install 'swift-r1[view]'\n"
        )


def test_help_and_faults_load_nothing_heavy() -> None:
    for words, code in ((["--help"], 0), (["--prot"], 2)):
        script = (
            "import sys; from swift_r1.cli.main import main; code = main(['view', *sys.argv[1:]]); "
            "print([name for name in ('nicegui', 'duckdb', 'pyarrow', 'torch', 'fastapi') if name in sys.modules]); "
            "sys.exit(code)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code
        assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.long
def test_the_page_beside_a_run_that_is_killed_ends_with_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    run, port = tmp_path / "run", free_port()
    words = words_of(tiny_model, run, max_steps=1000, view="true", view_port=port)
    training = subprocess.Popen(
        [sys.executable, "-m", "swift_r1", "rlhf", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        lines: list[str] = []
        until(lambda: lines.append(first_line(training)) or "swift view" in lines[-1], 120)
        assert re.fullmatch(
            rf"swift view: http://127.0.0.1:{port} \(it ends with the run\)\n", lines[-1]
        )
        children = living(psutil.Process(training.pid).children())
        [page] = [one for one in children if "swift_r1.lab.view.server" in one.cmdline()]
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20).status == 200
        training.kill()
        training.wait(60)
        wait_until_gone([page], 10)
    finally:
        training.kill()
        training.wait(60)
