"""The pages of completions and tokens in a real browser: what they show is what the files say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.runs.made import make_run, write_rows

HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">\x00\x1b[31m\u202e"
Tab = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "made", steps=6)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_the_table_shows_the_rows_of_the_file(viewer: Any, tab: Tab, run: Path) -> None:
    rows, page, url = lines(run / "completions.jsonl"), tab(), viewer(run).url

    def shown() -> list[tuple[str, str]]:
        page.wait_for_selector(".rows td")
        found = page.eval_on_selector_all(
            ".rows tbody tr",
            "all => all.map((row) => [...row.children].map((one) => [one.dataset.name, one.innerText]))",
        )
        return [(dict(row)["step"], dict(row)["completion"].split()[0]) for row in found]

    def expected(wanted: list[dict[str, Any]]) -> list[tuple[str, str]]:
        return [(str(row["step"]), row["completion"].split()[0]) for row in wanted][:50]

    page.goto(f"{url}/completions?run=made")
    assert shown() == expected(rows)
    page.goto(
        f"{url}/completions?run=made&where=reward>=0.5; finish_reason=stop&sort=tokens&desc=1"
    )
    right = [row for row in rows if (row["reward"] or 0) >= 0.5 and row["finish_reason"] == "stop"]
    assert shown() == expected(sorted(right, key=lambda row: -row["tokens"]))
    assert f"of {len(right)}" in page.inner_text(".said")
    page.goto(f"{url}/completions?run=made")
    word = rows[7]["completion"].split()[1]
    page.get_by_label("search in prompts and completions").fill(word)
    page.wait_for_function("location.search.includes('q=')")
    found = [row for row in rows if word in row["completion"]]
    page.wait_for_function(f"document.querySelector('.said').innerText.endsWith('of {len(found)}')")
    assert shown() == expected(found)
    page.reload()
    assert shown() == expected(found)
    page.click(".rows th button[data-sort=reward]")
    page.wait_for_function(
        "location.search.includes('sort=reward') && location.search.includes('desc=1')"
    )
    page.goto(f"{url}/completions?run=made&where=reward is high")
    page.wait_for_selector("text='reward is high' is not a condition")
    page.goto(f"{url}/completions?run=made")
    page.get_by_text("more filters").click()
    page.get_by_label("where").fill("countdown=1")
    right = [row for row in rows if row["rewards/countdown"] == 1]
    page.wait_for_function(f"document.querySelector('.said').innerText.endsWith('of {len(right)}')")
    assert shown() == expected(right)
    page.locator(".rows tbody tr").nth(1).locator("[data-name=class]").click(force=True)
    page.wait_for_selector(".cards .card:target .answer")


def test_a_group_says_why_each_got_what_it_got(viewer: Any, tab: Tab, run: Path) -> None:
    rows = lines(run / "completions.jsonl")
    mine = [row for row in rows if (row["step"], row["group"]) == (3, 0)]
    mine[0]["completion"] = HOSTILE
    mine[1]["messages"] = [
        {"role": "user", "content": "what is 3 + 9?"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "<b>"}]},
        {"role": "tool", "content": "12"},
    ]
    (run / "completions.jsonl").unlink()
    write_rows(run / "completions.jsonl", rows)
    bad = {
        "step": 3,
        "reward": "countdown",
        "kind": "exception",
        "cause": "ZeroDivisionError: <i>",
        "completion": "",
    }
    named = {"prompt_id": mine[2]["prompt_id"], "request_id": f"{mine[2]['request_id']}/2"}
    write_rows(run / "invalid_rewards.jsonl", [bad | named])
    page, url = tab(), viewer(run).url
    page.goto(f"{url}/group?run=made&step=3&group=0")
    cards = page.locator(".card")
    assert cards.count() == 4
    assert (
        "document.title" in cards.nth(0).inner_text()
        and "␀␛[31mU+202E" in cards.nth(0).inner_text()
    )
    assert page.title() != "taken"
    assert (
        page.locator(".turn.tool pre").inner_text() == "12" and "<b>" in cards.nth(1).inner_text()
    )
    assert "countdown is invalid (exception): ZeroDivisionError: <i>" in cards.nth(2).inner_text()
    assert page.locator(".why").count() == 1
    for place, row in enumerate(mine):
        said = cards.nth(place).inner_text()
        assert f"format {row['rewards/format']:g}" in said
        assert f"adv {row['advantage']:+g} · right" in said
    assert page.locator(".said .answer").inner_text() == "3"
    assert "4 completions: 4 right · mean reward 1.1" in page.locator(".said").all_inner_texts()
    assert '"3", 9 and 8' in page.locator("pre.prompt").inner_text()
    cards.nth(1).get_by_text("tokens").click()
    page.wait_for_selector(".tokens.text i")
    assert "number=1" in page.url
