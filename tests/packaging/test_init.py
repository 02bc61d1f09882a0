"""What `swift init` writes passes the check that it runs, has all that it names, and overwrites nothing."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest

from swift_r1.cli.init import BUNDLED, STARTERS, copy, recipes
from swift_r1.cli.main import main
from swift_r1.errors import EXIT_OK, EXIT_USAGE
from swift_r1.flags import RlhfArguments, parse_arguments
from tests import forks

ROOT = Path(__file__).resolve().parents[2]
ALL = recipes()


def swift(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forks.run(["-m", "swift_r1", *words], cwd=cwd, timeout=120)


@pytest.mark.parametrize("task", STARTERS)
def test_a_starter_passes_its_check(task: str, tmp_path: Path, tiny_model: Path) -> None:
    done = swift(tmp_path, "init", task, "new", "--model", str(tiny_model))
    assert done.returncode == EXIT_OK, done.stderr
    assert "all good" in done.stdout and "next: cd new; swift rlhf run.yaml" in done.stdout
    assert task == "judge" or "│ yes" in done.stdout  # the reward tells right from wrong
    with chdir(tmp_path / "new"):
        assert parse_arguments(RlhfArguments, ["run.yaml"]).model == str(tiny_model)


def test_the_names_are_unique_and_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    there = [path for top in ("examples", "plugins") for path in (ROOT / top).iterdir()]
    assert sorted(ALL.values()) == sorted(
        path.relative_to(ROOT).as_posix()
        for path in there
        if path.suffix != ".md" and path.name != "__pycache__"
    )
    assert not ALL.keys() & STARTERS.keys()
    assert main(["init"]) == EXIT_OK
    listed = capsys.readouterr().out
    for name in (*STARTERS, *ALL):
        assert re.search(rf"^  {name} +\S.*[^.]$", listed, re.MULTILINE), name


@pytest.mark.parametrize("name", ALL)
def test_a_copy_has_all_that_it_names(name: str, tmp_path: Path) -> None:
    places = copy(ALL[name], tmp_path)
    assert sorted(places) == sorted(
        one.relative_to(tmp_path).as_posix() for one in tmp_path.rglob("*") if one.is_file()
    )
    for place in places:
        copied = tmp_path / place
        assert copied.read_bytes() == (BUNDLED / place).read_bytes()
        assert os.access(copied, os.X_OK) == os.access(ROOT / place, os.X_OK)
        for named in re.findall(r"\b(?:examples|plugins)/[\w/]+(?:\.\w+)?", copied.read_text()):
            assert (tmp_path / named).exists(), f"{place} names {named}"
        for beside in re.findall(r'parents\[1\] / "(\w+)"', copied.read_text()):
            assert (tmp_path / "examples" / beside).exists(), f"{place} imports {beside}"


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["init", "plugins/gsm8k.py", str(tmp_path)]
    assert main(words) == EXIT_OK and main(words) == EXIT_OK  # the same file is left as it is
    (tmp_path / "plugins/gsm8k.py").write_text("mine")
    (tmp_path / "plugin.py").write_text("mine")
    capsys.readouterr()
    for name, said in ("gsm8k_ppo", "plugins/gsm8k.py"), ("maths", "plugin.py"):
        assert main(["init", name, str(tmp_path)]) == EXIT_USAGE
        assert f"holds other files already: {said}: name another" in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["gsm8k.py", "plugin.py", "plugins"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["init", "countdwn"],
            "there is no starter, recipe or plugin countdwn: did you mean countdown?",
        ),
        (["init", "a", "b", "c"], "swift init NAME FOLDER, not: swift init a b c"),
        (["init", "maths", "a", "--model", "../none"], "--model ../none: there is no such folder"),
        (["init", "countdown", "/dev/null/x"], "/dev/null/x cannot be written: Not a directory"),
        (["init", "maths", "/dev/null/x"], "/dev/null/x cannot be written: Not a directory"),
        (["demo", "--algorithm", "dpo"], "--algorithm must be one of grpo, ppo, not 'dpo'"),
        (["demo", "--output_dir", "/dev/null/x"], "cannot be made: Not a directory"),
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == EXIT_USAGE
    assert said in capsys.readouterr().err
