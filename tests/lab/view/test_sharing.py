"""What open pages share: readers, and the order of what they ask."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from pathlib import Path

import pytest

from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.query import CompletionQuery
from swift_r1.lab.view import shell
from tests.lab.runs.made import make_run


def test_a_reader_that_a_page_still_has_is_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "_opened", OrderedDict())
    monkeypatch.setattr(shell, "_MOST_OPENED", 1)
    path = make_run(tmp_path / "run", steps=2) / "completions.jsonl"
    with (
        shell.opened(CompletionTable, path) as table,
        shell.opened(CompletionTable, tmp_path / "other"),
    ):
        assert shell.opened(CompletionTable, tmp_path / "other") is not table
        assert table.refresh() == table.count(CompletionQuery()) > 0
        with shell.opened(CompletionTable, path) as again:
            assert again is not table


def test_of_several_questions_the_last_is_answered() -> None:
    may_end, said = threading.Event(), []

    def slow() -> str:
        assert may_end.wait(60)
        return "slow"

    def wrong() -> str:
        assert may_end.wait(60)
        raise ValueError("wrong")

    async def ask() -> None:
        latest = shell.Latest()
        overtaken = [asyncio.create_task(latest(work)) for work in (slow, wrong)]
        await asyncio.sleep(0)
        said.append(await latest(lambda: "quick"))
        may_end.set()
        said.extend(await asyncio.gather(*overtaken))
        with pytest.raises(ValueError, match="wrong"):
            await latest(wrong)

    asyncio.run(ask())
    assert said == ["quick", None, None]
