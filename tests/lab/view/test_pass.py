"""One way through all pages in a browser, as a user takes it, on a narrow screen and in the dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import until
from tests.lab.runs.made import make_run
from tests.lab.runs.timed import write_spans
from tests.lab.view.conftest import Viewer, series

_IS_DARK = "document.body.classList.contains('body--dark')"
_WIDTH = "document.documentElement.scrollWidth"


def test_a_way_through_the_pages(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs" / "a run", steps=6)
    write_spans(run, "rank-0", 6)
    page = tab(400)

    def arrived(selector: str) -> None:
        page.wait_for_selector(selector)
        assert page.evaluate(_WIDTH) <= 400, page.url
        until(lambda: page.evaluate(_IS_DARK))

    page.goto(viewer(run).url)
    until(lambda: series(page, "Reward"))
    page.keyboard.press("?")
    keys = page.locator("dialog.view-help kbd").all_inner_texts()
    assert {"g", "o", "t", "p"} <= set(keys)
    page.keyboard.press("Escape")
    for _ in range(2):  # as the system, light, dark
        page.keyboard.press("t")
    page.click("text=what the curves mean")
    page.get_by_text("mean reward of the completions").first.wait_for()
    page.get_by_label("find a metric").fill("reward_std")
    until(lambda: series(page, "Spread of rewards") and not series(page, "Loss"))
    page.get_by_label("find a metric").press("Escape")

    page.locator("[data-go=o]").focus()
    page.keyboard.press("g")
    page.keyboard.press("c")
    arrived(".rows tbody tr")
    page.locator(".rows a[data-item]").first.press("Enter")
    arrived(".cards .card")
    page.get_by_text("tokens", exact=True).first.click()
    arrived(".tokens.text i")
    page.get_by_text("this prompt in every step").click()
    arrived(".rows tbody tr")
    page.keyboard.press("g")
    page.keyboard.press("t")
    arrived(".view-table td")
    assert "rank-0 was idle for" in page.inner_text(".view-idle")
