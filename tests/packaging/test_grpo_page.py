"""The worked example of docs/grpo.md computes what its comments say, by functions of the names on the page."""

from __future__ import annotations

import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "grpo.md").read_text()
NUMBER = re.compile(r"-?\d+\.\d+")


def numbers(text: str) -> list[float]:
    return [float(found) for found in NUMBER.findall(text)]


def test_the_example_computes_what_its_comments_say(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    # A comment behind a print has the values first, then how they come about.
    said = [comment.split(":")[0] for comment in re.findall(r"print\(.*?\)  # (.*)", code)]
    (tmp_path / "example.py").write_text(code)
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(tmp_path / "example.py"))
    wanted = [number for comment in said for number in numbers(comment)]
    assert len(said) == 8
    assert numbers(printed.getvalue()) == pytest.approx(wanted, abs=6e-5)
