"""docs/from-trl.md, from-verl.md and from-openrlhf.md: our flags and defaults are what the parser knows, commands are
accepted, and rewards are carried over as the pages say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_r1.flags import RlhfArguments, RolloutArguments
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.flags.fields import from_words, spellings

pytestmark = pytest.mark.long
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    name: (DOCS / f"{name}.md").read_text() for name in ("from-trl", "from-verl", "from-openrlhf")
}
COMMANDS = {"rlhf": RlhfArguments, "rollout": RolloutArguments, "eval": EvalArguments}


def rows(page: str) -> Iterator[tuple[str, str]]:
    """Theirs and ours, of every row of every table."""
    here = None
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if "here" in cells:
            here = cells.index("here")
        elif not cells:
            here = None
        elif here is not None and cells[0] != "---":
            yield cells[0], cells[here]


def fences(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def words_of(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def named_flags(cell: str) -> Iterator[tuple[type, str, list[str]]]:
    """The command, the flag and the values behind it, of each flag in a cell."""
    for code in re.findall("`([^`]*)`", cell):
        words = code.split()
        command = COMMANDS.get(words[1]) if words[:1] == ["swift"] else RlhfArguments
        if command is None:
            continue
        for place, word in enumerate(words):
            if word.startswith("--"):
                values = []
                for value in words[place + 1 :]:
                    if value.startswith("--"):
                        break
                    values.append(value)
                yield command, word.removeprefix("--"), values


@pytest.mark.parametrize("page", PAGES)
def test_our_flags_exist_and_take_the_values_shown(page: str) -> None:
    found = 0
    for theirs, ours in rows(PAGES[page]):
        if ours == "the same":
            names = re.findall(r"`-{0,2}(\w+)=?`", theirs)
            assert names and set(names) <= spellings(RlhfArguments).keys(), theirs
            found += len(names)
        for command, flag, values in named_flags(ours):
            spec = spellings(command).get(flag)
            assert spec is not None, (flag, ours)
            if values:
                from_words(spec, values)  # raises for what is no value of it
            found += 1
    assert found > 90
