"""An episode as a tree: every call in its place, whatever the run's files hold, and a page that keys walk through."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from swift_r1.lab.view.episode_html import episode_tree
from swift_r1.lab.view.message_html import AS_WRITTEN, Look
from tests.lab.html import Reader
from tests.lab.runs.made import make_run, write_rows
from tests.lab.view.test_completion_html import NAMES, OURS, VALUE
from tests.record.test_episodes import ROW

TOOLS = [{"name": "look", "arguments": '{"at": 1}', "outcome": "error", "content": "a door"}]
EPISODE: dict[str, Any] = ROW | {
    "tool_calls": TOOLS,
    "turn_rewards": [0.0, -1.0, 0.25, 0.5, 1.0],
    "turn_advantages": [0.5, -1.25, None, 0.0, 1.0],
}
TIMES = {"calls": [0.5, 1.25, 30.0, 0.125, 2.0], "tools": [0.25], "own": 1.0}


def lines(html: str) -> list[str]:
    """The line of each call and tool, without its excerpt."""
    found = re.findall(r"<summary data-item>(.*?)(?:<span.*?)?</summary>", html, re.DOTALL)
    return [re.sub(r"<.*?>", "", line).replace("&quot;", '"') for line in found]


def test_calls_stand_under_those_that_they_go_back_to() -> None:
    html = episode_tree(EPISODE, TIMES, AS_WRITTEN)
    assert lines(html) == [
        "turn 1 · 2 tok · reward 0 · adv +0.5 · 0.5 s · calls look",
        'look · {"at": 1} · error · 0.25 s',
        "turn 4 · branch: goes back to turn 1 · 2 tok · reward 0.5 · adv +0 · 0.12 s",
        "turn 5 · 2 tok · reward 1 · adv +1 · 2 s",
        "turn 2 · 2 tok · reward -1 · adv -1.25 · 1.2 s",
        "turn 3 · new: another conversation · 2 tok · reward 0.25 · 30 s",
    ]
    assert re.findall(r'<li class="(d\d)">', html) == ["d0", "d1", "d1", "d0", "d0"]
    assert html.count("a door") == 1  # under the tool alone
    assert " open" not in html
    assert episode_tree(EPISODE, TIMES, Look(words="SURE?")).count(" open") == 0
    assert episode_tree(EPISODE, TIMES, Look(words="DOOR")).count(" open") == 1
    assert episode_tree({"messages": []}, {}, AS_WRITTEN) == ""


PARTS = ["calls", "messages", "other_messages", "tool_calls", "turn_rewards", "turn_advantages"]


@settings(max_examples=200, deadline=None)
@given(
    some.dictionaries(some.sampled_from(PARTS), VALUE, max_size=3),
    some.dictionaries(some.sampled_from(["calls", "tools"]) | NAMES, VALUE, max_size=2),
    some.sampled_from(["content", "tool_calls", "tool_call_id", "role"]),
    VALUE,
)
def test_any_row_is_a_tree_of_our_tags_alone(
    damage: dict[str, Any], times: dict[str, Any], name: str, value: Any
) -> None:
    other = EPISODE | {"messages": [one | {name: value} for one in EPISODE["messages"]]}
    html = episode_tree(EPISODE | damage, times, AS_WRITTEN) + episode_tree(other, TIMES, Look())
    found = Reader(html)
    html.encode()
    assert set(found.tags) <= OURS | {"ol", "li"} and {name for name, _ in found.attributes} <= {
        "class",
        "title",
        "open",
        "data-item",
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose first group has episodes, the second without calls of the model."""
    run = make_run(tmp_path / "runs" / "made", steps=2)
    rows = [
        {
            "step": 1,
            "prompt_id": "door:0",
            "request_id": "run/0/0",
            "group": 0,
            "number": number,
            "prompt": "find it",
            "completion": "yes",
            "rewards/found": 1.0 - number,
            "reward": 1.0 - number,
            "advantage": 0.7 - number,
            "finish_reason": "stop",
            "weight_version": 0,
            "tokens": 10,
            "turns": 5,
            **EPISODE,
        }
        for number in range(2)
    ]
    rows[1] |= {"calls": [], "messages": [{"role": "user", "content": "find it"}]}
    (run / "completions.jsonl").unlink()
    write_rows(run / "completions.jsonl", rows)
    known = {"step": 1, "request_id": "run/0/0", "number": 0}
    write_rows(run / "episode_times.jsonl", [known | {"calls": [9.0] * 5}, known | TIMES])
    return run


@pytest.mark.parametrize(
    ("width", "theme"), [(390, "dark"), pytest.param(1280, "light", marks=pytest.mark.long)]
)
def test_an_episode_in_its_group(
    viewer: Any, tab: Callable[..., Any], run: Path, width: int, theme: str
) -> None:
    page, url = tab(width, theme), viewer(run).url
    page.goto(f"{url}/group?run=made&step=1&group=0")
    page.wait_for_selector(".tree")
    assert page.locator(".tree").count() == 1  # of the episode whose calls are known
    assert page.locator(".tree > li").count() == 5 and page.get_by_text("30 s").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator(".tree").get_by_text("a door").is_hidden()
    for _ in range(3):  # the card, its first turn, and what branches off there
        page.keyboard.press("j")
    assert page.evaluate("document.activeElement.innerText").startswith("turn 4 · branch")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.innerText").startswith("turn 1")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    assert page.locator(".tree").get_by_text("a door").is_visible()
