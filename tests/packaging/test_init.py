"""What `swift init` writes passes the check that it runs; its flags are those of a run."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

import pytest

from swift_r1.cli.init import TASKS
from swift_r1.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from swift_r1.flags import RlhfArguments, parse_arguments
from tests import forks

ROOT = Path(__file__).resolve().parents[2]


def swift(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forks.run(["-m", "swift_r1", *words], cwd=cwd, timeout=120)


@pytest.mark.parametrize("task", TASKS)
def test_a_starter_passes_its_check(task: str, tmp_path: Path, tiny_model: Path) -> None:
    done = swift(tmp_path, "init", "new", "--task", task, "--model", str(tiny_model))
    assert done.returncode == EXIT_OK, done.stderr
    assert "all good" in done.stdout and "next: cd new; swift rlhf run.yaml" in done.stdout
    assert task == "judge" or "│ yes" in done.stdout  # the reward tells right from wrong
    with chdir(tmp_path / "new"):
        assert parse_arguments(RlhfArguments, ["run.yaml"]).model == str(tiny_model)


def test_it_overwrites_nothing_and_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "plugin.py").write_text("mine")
    for words, said in (
        (("new", "--task", "maths"), "new already has plugin.py: name another folder"),
        (("new",), "swift init FOLDER --task maths|format|code|judge|agent"),
        ((), "swift init FOLDER --task maths|format|code|judge|agent"),
        (("a", "b", "--task", "maths"), "one folder, not 2: a b"),
        (
            ("new", "--task", "mats"),
            "--task must be one of maths, format, code, judge, agent, not 'mats'",
        ),
        (("", "--task", "maths"), "swift init FOLDER --task maths|format|code|judge|agent"),
        (
            ("new", "--task", "maths", "--model", "../models/none"),
            "--model ../models/none: there is no such folder",
        ),
        (("new/plugin.py/x", "--task", "maths"), "cannot be written: Not a directory"),
    ):
        done = swift(tmp_path, "init", *words)
        assert done.returncode == EXIT_USAGE and said in done.stderr, done.stderr
    assert (tmp_path / "new" / "plugin.py").read_text() == "mine"
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["new", "plugin.py"]


def typed(cwd: Path, *answers: str) -> tuple[int, str]:
    """`swift init` in a terminal, each question answered as it comes; its exit code and all that the terminal shows.

    Ctrl-C is pressed again while nothing happens: between the question and the read, Python's `input` misses it.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "swift_r1", "init"])
    shown, left = b"", list(answers)
    deadline, last = time.monotonic() + 120, ""
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            if last == "\x03":
                os.write(terminal, last.encode())
            continue
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # how Linux says that the other side has closed
            break
        if shown.endswith(b"] ") and left:
            last = left.pop(0)
            os.write(terminal, last.encode())
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_answers_are_asked_for_again_until_they_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "my-format").mkdir()
    (tmp_path / "my-format" / "plugin.py").write_text("mine")
    code, shown = typed(tmp_path, "formal\n", "2\n", "my-format\n", "\n", "\n")
    assert code == EXIT_OK and "all good" in shown, shown
    assert "one of maths, format, code, judge, agent" in shown
    assert "my-format already has plugin.py" in shown
    assert (
        "Into which folder? [my-format-2]" in shown
        and "next: cd my-format-2; swift rlhf run.yaml" in shown
    )
    assert (tmp_path / "my-format" / "plugin.py").read_text() == "mine"


def test_ctrl_c_and_ctrl_d_leave_nothing_behind(tmp_path: Path) -> None:
    assert typed(tmp_path, "1\n", "new\n", "\x03")[0] == EXIT_INTERRUPTED
    assert typed(tmp_path, "1\n", "new\n", "\x04")[0] == EXIT_USAGE
    assert list(tmp_path.iterdir()) == []


def test_the_folder_may_be_this_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = swift(tmp_path, "init", ".", "--task", "maths")
    assert done.returncode == EXIT_OK, done.stderr
    assert (
        ".: data.jsonl, plugin.py, run.yaml\n" in done.stdout
        and "\nnext: swift rlhf run.yaml\n" in done.stdout
    )
