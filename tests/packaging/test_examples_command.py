"""`swift examples` copies what a recipe needs and overwrites nothing; `swift demo` says at once what is wrong."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from swift_r1.cli.examples import BUNDLED, all_examples, copy
from swift_r1.cli.main import main
from swift_r1.errors import EXIT_OK, EXIT_USAGE, UsageError

ROOT = Path(__file__).resolve().parents[2]
ALL = {one.name: one for one in all_examples()}


def test_the_names_are_unique_and_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    places = sorted(one.place for one in all_examples())
    assert len(ALL) == len(places)
    there = [path for top in ("examples", "plugins") for path in (ROOT / top).iterdir()]
    assert places == sorted(
        path.relative_to(ROOT).as_posix()
        for path in there
        if path.suffix != ".md" and path.name != "__pycache__"
    )
    assert main(["examples"]) == EXIT_OK
    listed = capsys.readouterr().out
    for name in ALL:
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
    words = ["examples", "copy", "plugins/gsm8k.py", str(tmp_path)]
    assert main(words) == EXIT_OK and main(words) == EXIT_OK  # the same file is left as it is
    mine = tmp_path / "plugins/gsm8k.py"
    mine.write_text("mine")
    capsys.readouterr()
    with pytest.raises(UsageError, match=r"holds other files already: plugins/gsm8k.py"):
        copy(ALL["gsm8k_ppo"], tmp_path)
    assert main(words) == EXIT_USAGE
    assert "holds other files already" in capsys.readouterr().err
    assert mine.read_text() == "mine" and not (tmp_path / "examples").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["examples", "copy", "countdwn"], "there is no example countdwn: did you mean countdown?"),
        (["examples", "copy", "xyzzy"], "there is no example xyzzy: known are calculator_agent, "),
        (["examples", "copy"], "swift examples [copy NAME [FOLDER]], not: swift examples copy"),
        (
            ["examples", "copy", "countdown", "/dev/null/x"],
            "/dev/null/x cannot be written: Not a directory",
        ),
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
