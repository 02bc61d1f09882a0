"""What `swift init` writes passes the check that it runs; its flags are those of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from swift_r1.arguments import RlhfArguments, parse_arguments
from swift_r1.arguments.init import TASKS
from swift_r1.errors import EXIT_OK, EXIT_USAGE

ROOT = Path(__file__).resolve().parents[2]


def swift(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swift_r1", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


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
        (("new", "--task", "maths"), "new holds plugin.py already: name another folder"),
        (("new",), "swift init FOLDER --task maths|format|code|judge|agent"),
        ((), "swift init FOLDER --task maths|format|code|judge|agent"),
        (("a", "b", "--task", "maths"), "one folder, not 2: a b"),
        (("new", "--task", "mats"), "--task must be one of maths, format, code, judge, agent, not 'mats'"),
        (("new/plugin.py/x", "--task", "maths"), "cannot be written: Not a directory"),
    ):
        done = swift(tmp_path, "init", *words)
        assert done.returncode == EXIT_USAGE and said in done.stderr, done.stderr
    assert (tmp_path / "new" / "plugin.py").read_text() == "mine"
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["new", "plugin.py"]
