"""What open pages share: readers, and the order of what they ask."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.query import CompletionQuery
from swift_r1.lab.view import shell
from swift_r1.lab.view.pages.tokens import _Tokens
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


def test_of_tokens_that_are_clicked_one_after_the_other_the_last_is_asked_for() -> None:
    asked, said = [], []

    async def alternatives(token_ids: list[int], temperature: float) -> list[tuple[str, float]]:
        asked.append((token_ids, temperature))
        await asyncio.sleep(0)
        return [("x", -1.0)]

    async def click() -> None:
        page: Any = SimpleNamespace(
            page=SimpleNamespace(run=SimpleNamespace(args={"temperature": 0.5})),
            source=lambda: SimpleNamespace(name="a source", alternatives=alternatives),
            row={"prompt_token_ids": [1]},
            ids=[5, 6, 7],
            pieces=["a", "b", "c"],
            answer=SimpleNamespace(set_content=said.append),
            asked=None,
            turn=asyncio.Lock(),
        )
        await asyncio.gather(*(_Tokens._chosen(page, place) for place in range(3)))

    asyncio.run(click())
    assert asked == [([1], 0.5), ([1, 5, 6], 0.5)]
    assert [one for one in said if "instead of" in one] == said[
        -1:
    ] and "instead of &#x27;c&#x27;" in said[-1]
