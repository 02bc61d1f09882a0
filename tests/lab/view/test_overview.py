"""The overview in a real browser, of a real run that trains meanwhile and of runs that are made up."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.conftest import until
from tests.e2e.live_run import words_of
from tests.lab.diagnosis.recorded import RUNS, rows_of, run_folder
from tests.lab.runs.made import make_run
from tests.lab.view.conftest import Viewer, series


def rows(run: Path) -> list[dict[str, Any]]:
    """The whole lines of logging.jsonl."""
    text = (run / "logging.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def logged(run: Path, name: str) -> list[list[float]]:
    return [[row["step"], row[name]] for row in rows(run) if row.get(name) is not None]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "a run", steps=30)


@pytest.mark.long
def test_the_page_follows_a_run_that_trains_and_shows_what_its_files_say(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = words_of(tiny_model, run, max_steps=400, eval_steps=10, save_steps=10, eval_limit=8)
    training = forks.start(
        ["-m", "swift_r1", "rlhf", *words], environ={"OMP_NUM_THREADS": "1"}, stdout=forks.DEVNULL
    )
    try:
        until(lambda: (run / "logging.jsonl").is_file() and rows(run), 120)
        page = tab()
        page.goto(viewer(run).url)
        seen = until(lambda: series(page, "Reward").get("reward"))
        assert "running" in page.inner_text(".view-verdict")
        later = until(lambda: (more := series(page, "Reward")["reward"]) != seen and more)
        assert later[: len(seen)] == seen
        assert len(rows(run)) > 12 or until(lambda: len(rows(run)) > 12)
        training.terminate()
        assert training.wait(60) == 143
        last = rows(run)[-1]["step"]
        until(lambda: f"step {last} of 400" in page.inner_text(".view-verdict"))
        until(lambda: "interrupted" in page.inner_text(".view-verdict"))
        for title, name, metric in (
            ("Reward", "reward", "reward"),
            ("Entropy of the policy", "entropy", "entropy"),
            ("Completion length", "longest", "completions/max_length"),
            ("Trainer against engine", "logp_diff", "rollout/logp_diff"),
            ("Evaluation: counting", "accuracy", "eval/counting/accuracy"),
        ):
            until(
                lambda title=title, name=name, metric=metric: (
                    series(page, title)[name] == logged(run, metric)
                )
            )
    finally:
        training.kill()
        training.wait(60)


def test_an_address_that_names_nothing_says_so_within_the_frame(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], made: Path
) -> None:
    page, url = tab(calm=False), viewer(made).url
    for address, said in (
        ("/?run=<b>none</b>", "there is no run '<b>none</b>' here: a run"),
        ("/nosuchpage", "There is no page /nosuchpage."),
    ):
        assert page.goto(url + address).status == 404
        assert page.inner_text(".view-problem") == said
        page.get_by_role("link", name="Overview").click()
        until(lambda: series(page, "Reward"))


@pytest.mark.long
def test_the_verdict_is_the_headline_and_follows_the_run(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], tmp_path: Path
) -> None:
    name = "demo, seed 0"
    [recorded] = [one for one in RUNS if one["name"] == name]
    rising = run_folder(tmp_path / "runs" / "rising", name, lines=1)
    run_folder(tmp_path / "runs" / "silent", "impossible problems")
    page, url = tab(400), viewer(tmp_path / "runs").url
    page.goto(f"{url}/?run=rising")
    headline = page.get_by_role("region", name="verdict")
    until(lambda: "Reward: no verdict" in headline.inner_text())
    *further, last = rows_of(recorded)[1:]
    _append(rising, further)
    until(lambda: re.search("Reward: (solved|rises)", headline.inner_text()), 20)
    assert "(95 %: +" in headline.inner_text() and "Why" not in headline.inner_text()
    assert "reward format" not in headline.inner_text()
    headline.get_by_text("each reward").click()
    until(lambda: "reward format" in headline.inner_text())

    page.goto(f"{url}/?run=silent")
    until(lambda: "Reward: flat" in headline.inner_text())
    lines = headline.inner_text().splitlines()
    assert any(line.startswith("Why: no signal: 100%") for line in lines)
    assert any(line.startswith("Try: ") for line in lines)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400

    page.goto(f"{url}/?run=rising&run=silent")
    rows = page.locator(".view-table").first.locator("tr")
    row = rows.filter(has_text="silent")
    until(lambda: {"flat", "no signal"} <= set(row.locator("td").all_inner_texts()))
    before = rows.filter(has_text="rising").inner_text()
    _append(rising, [last])
    until(lambda: rows.filter(has_text="rising").inner_text() != before)
    row.get_by_role("link", name="silent").click()
    page.wait_for_url("**/?run=silent")


_POINT = """(number) => {
  const chart = getElement(document.querySelector(".view-chart").id.slice(1)).chart;
  const [x, y] = chart.convertToPixel({ gridIndex: 0 }, chart.getOption().series[0].data[number]);
  return { x, y };
}"""
_POINTED = """() => [...document.querySelectorAll(".view-chart")].filter((one) =>
  [...one.querySelectorAll("div")].some((tip) => tip.innerText.startsWith("step 20") && tip.style.opacity !== "0")
).length"""


def test_a_point_leads_to_its_completions_and_all_charts_are_pointed_at(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], made: Path
) -> None:
    page, url = tab(), viewer(made).url
    page.goto(url)
    chart = page.locator(".view-chart[data-ready]").first
    chart.wait_for()
    chart.hover(position=page.evaluate(_POINT, 19))
    until(lambda: page.evaluate(_POINTED) > 2, 10)
    # a round has two steps, and is called after its first
    chart.click(position=page.evaluate(_POINT, 19))
    page.wait_for_url("**/completions?run=a+run&step=19")
    page.goto(url)
    chart.wait_for()
    chart.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/completions?run=a+run&step=3")


def _append(run: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with (run / "logging.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
