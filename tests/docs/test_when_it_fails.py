"""docs/when-it-fails.md: each message that it quotes is one of ours, and each flag that it names has its address."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.shown import ROOT

pytestmark = pytest.mark.long
PAGE = (ROOT / "docs" / "when-it-fails.md").read_text()
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
SOMETHING = "\0"  # what a text is formatted with


@cache
def texts() -> list[str]:
    """All texts of our sources, f-strings with `SOMETHING` for what they insert."""
    found = []
    for path in (ROOT / "swift_r1").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    one.value if isinstance(one, ast.Constant) else SOMETHING for one in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_stands_in_the_code(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    pattern = re.compile(r"\W*\0.*?".join(parts), re.DOTALL)
    assert any(map(pattern.search, texts())), message
