"""Tools in worker processes: whatever a tool does, the model gets a short text, and the next call works."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from swift_r1.errors import UsageError
from swift_r1.plugins import load_plugins
from swift_r1.plugins.tools.calling import ToolAnswer
from swift_r1.plugins.tools.parsing import ToolCall
from swift_r1.plugins.tools.pool import ToolLimits, ToolPool
from tests.conftest import until

PLUGIN = Path(__file__).parent / "tools_plugin.py"
NAMES = ("add", "echo", "fails", "forks", "hangs", "hoards", "leaves", "meets", "moves", "secret")
ARGS = SimpleNamespace(
    reward_timeout=10.0,
    reward_num_workers=2,
    reward_memory_limit=1.0,
    reward_env=[],
    reward_isolation="process",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[ToolPool]:
    with ToolPool(ARGS, ToolLimits(2.0, 40), partial(load_plugins, [str(PLUGIN)])) as made:
        made.wait_ready(NAMES)
        yield made


@pytest.fixture
def call(pool: ToolPool) -> Callable[..., list[ToolAnswer]]:
    """`call((name, arguments), ...) -> answers`, all of one turn"""

    def run(*calls: tuple[str, Any]) -> list[ToolAnswer]:
        made = [
            ToolCall(str(place), name, given if isinstance(given, str) else json.dumps(given))
            for place, (name, given) in enumerate(calls)
        ]
        answers = asyncio.run(pool.call(made, NAMES))
        assert pool.running == 0
        return answers

    return run


def test_answers_are_text_or_json_in_the_order_of_the_calls(
    call: Callable[..., list[ToolAnswer]],
) -> None:
    found = call(
        ("echo", {"text": "ä\n", "times": 2}),
        ("add", {"a": 1, "b": 2.5}),
        ("secret", {"name": "NONE"}),
    )
    assert [one.content for one in found] == ["ä\nä\n", "3.5", "null"]
    assert {one.outcome for one in found} == {"answer"} and not any(one.cut for one in found)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("add", {"a": 1}, "Error: b: Missing required argument"),
        ("add", {"a": 1, "b": "2"}, "Error: b: Input should be a valid number"),
        ("add", {"a": 1, "b": 2, "c": 3}, "Error: c: Unexpected keyword argument"),
        ("add", "{'a': 1}", "Error: Invalid JSON: key must be a string"),
        ("add", "", "Error: a: Missing required argument"),
        ("add", "[1, 2]", "Error: the arguments are not a JSON object"),
        ("fails", {"how": "now"}, "Error: ConnectionError: the search engine is away now"),
        ("fails", {"how": "exits"}, "Error: SystemExit: 0"),
        ("fails", {"how": "closes"}, "Error: its process died"),
        ("fails", {"how": "speechless"}, "Error: Speechless: (it has no message"),
        (
            "fails",
            {"how": "lock"},
            "Error: TypeError: Object of type lock is not JSON serializable",
        ),
        ("fails", {"how": "dies"}, "Error: its process died"),
        ("fails", {"how": "memory"}, "Error: MemoryError"),
    ],
)
def test_errors_are_one_line_for_the_model(
    call: Callable[..., list[ToolAnswer]], name: str, arguments: Any, says: str
) -> None:
    with_another = call((name, arguments), ("add", {"a": 1, "b": 1}))
    assert with_another[0].outcome == "error"
    assert with_another[0].content.startswith(says[:40]) and "\n" not in with_another[0].content
    assert with_another[1].content == "2.0"


def test_a_tool_that_hangs_is_killed_with_what_it_started(
    call: Callable[..., list[ToolAnswer]], tmp_path: Path
) -> None:
    started = time.monotonic()
    one, other, third = call(
        ("hangs", {"seconds": 60, "folder": str(tmp_path)}),
        ("hangs", {"seconds": 60.5, "folder": str(tmp_path)}),
        ("echo", {"text": "later"}),
    )
    assert (
        one.content == other.content == "Error: no answer within 2 s" and one.outcome == "timeout"
    )
    assert third.content == "later" and time.monotonic() - started < 40
    begun = [path.read_text() for path in tmp_path.iterdir()]
    assert begun
    until(lambda: not any(psutil.pid_exists(int(child)) for child in begun), 10)


def test_long_answers_are_cut_with_a_mark(call: Callable[..., list[ToolAnswer]]) -> None:
    [found] = call(("echo", {"text": "abcdefghij", "times": 100_000}))
    assert found.content == "abcdefghij" * 4 + " [999960 more characters]" and found.cut


def test_half_a_character_is_replaced(call: Callable[..., list[ToolAnswer]]) -> None:
    assert call(("fails", {"how": "half"}))[0].content == "a?"


def test_a_list_is_a_tuple_where_the_tool_wants_one(call: Callable[..., list[ToolAnswer]]) -> None:
    found = call(("moves", {"way": "back", "by": [1, 2]}), ("moves", {"way": "back", "by": [1]}))
    assert found[0].content == "[-1, -2]" and found[1].content.startswith(
        "Error: by.1: Field required"
    )


def test_no_call_changes_the_folder_of_another(
    call: Callable[..., list[ToolAnswer]], tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    for _ in range(2):
        found = call(*[("leaves", {"folder": str(tmp_path / "gone")})] * 4)
        assert {one.content for one in found} == {os.getcwd()}


def test_a_tool_that_leaves_no_files_to_open_costs_its_worker(
    call: Callable[..., list[ToolAnswer]],
) -> None:
    assert call(("hoards", {}))[0].content == "Error: its process died"
    assert call(("echo", {"text": "a"}), ("echo", {"text": "b"}))[1].content == "b"


def test_a_tool_that_forks_answers_once(call: Callable[..., list[ToolAnswer]]) -> None:
    for _ in range(3):
        assert [
            one.content for one in call(("forks", {}), ("echo", {"text": "a"}), ("forks", {}))
        ] == ["0", "a", "0"]


def test_an_unknown_tool_is_named_with_the_known_ones(
    call: Callable[..., list[ToolAnswer]],
) -> None:
    [found] = call(("subtract", {}))
    assert found.outcome == "unknown" and "no tool 'subtract'; there are add, echo" in found.content


def test_calls_of_a_turn_run_together_and_see_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "k")
    asked = [
        *(ToolCall("", "secret", json.dumps({"name": name})) for name in ("SOME_API_KEY", "PATH")),
        *(
            ToolCall("", "meets", json.dumps({"folder": str(tmp_path), "who": a, "other": b}))
            for a, b in ("xy", "yx")
        ),
    ]
    with ToolPool(ARGS, ToolLimits(60.0, 40), partial(load_plugins, [str(PLUGIN)])) as own:
        found = [one.content for one in asyncio.run(own.call(asked, NAMES))]
    assert found[0] == "null" != found[1] and found[2:] == ["met", "met"]


def test_workers_that_lack_a_tool_are_told(pool: ToolPool) -> None:
    with pytest.raises(UsageError, match="do not have the tools divide"):
        pool.wait_ready(("add", "divide"))
