"""The overview in a real browser, of a real run that trains meanwhile and of runs that are made up."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

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


def query(page: Any) -> dict[str, str]:
    return {
        name: values[0]
        for name, values in parse_qs(urlsplit(page.evaluate("location.href")).query).items()
    }


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "a run", steps=30)


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


def test_zoom_and_scroll_stay_while_a_run_grows_and_a_link_restores_them(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], made: Path
) -> None:
    page, url = tab(), viewer(made).url
    page.goto(url)
    until(lambda: series(page, "Reward"))
    place = page.locator(".view-chart[aria-label=Reward][data-ready]")
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 120)
    page.mouse.down()
    page.mouse.move(box["x"] + 250, box["y"] + 125, steps=5)
    page.mouse.up()
    asked = until(lambda: "from" in (found := query(page)) and found)
    low, high = float(asked["from"]), float(asked["to"])
    assert 0 < low < high < 30
    # all charts of the page follow
    assert zoom(page, "Loss") == pytest.approx((low, high), rel=1e-4)
    page.evaluate("window.scrollTo(0, 60)")
    with (made / "logging.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "loss": 5, "reward": 0.5}) + "\n")
    until(lambda: series(page, "Loss")["loss"][-1] == [31, 5])
    assert zoom(page, "Loss") == pytest.approx((low, high), rel=1e-4)
    assert page.evaluate("window.scrollY") == 60
    other = tab()
    other.goto(page.url)
    until(lambda: series(other, "Reward"))
    assert zoom(other, "Reward") == pytest.approx((low, high), rel=1e-4)


def zoom(page: Any, title: str) -> tuple[float, float]:
    found = page.evaluate(
        """(title) => {
          const place = [...document.querySelectorAll(".view-chart")].find((one) => one.ariaLabel === title);
          const { startValue, endValue } = getElement(place.id.slice(1)).chart.getOption().dataZoom[0];
          return [startValue, endValue];
        }""",
        title,
    )
    return found[0], found[1]


def test_what_a_control_changes_is_in_the_link(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], made: Path
) -> None:
    page = tab()
    page.goto(viewer(made).url)
    until(lambda: series(page, "Entropy of the policy"))
    raw = series(page, "Entropy of the policy")["entropy"]
    page.locator(".q-slider__track-container").press("ArrowRight")
    until(lambda: query(page).get("smooth") == "0.01")
    page.locator(".q-slider__track-container").press("ArrowLeft")
    until(lambda: "smooth" not in query(page))
    other = tab()
    other.goto(page.url + "?smooth=0.6")
    smooth = until(lambda: series(other, "Entropy of the policy"))["entropy"]
    assert [x for x, _ in smooth] == [step for step, _ in raw]
    mean = share = 0.0
    for (_, value), (_, shown) in zip(raw, smooth, strict=True):
        mean, share = 0.6 * mean + 0.4 * value, 0.6 * share + 0.4
        assert shown == pytest.approx(mean / share)


@pytest.mark.long
def test_seeds_are_one_line(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], tmp_path: Path
) -> None:
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"seed-{seed}", steps=8, seed=seed)
    one, two = (logged(tmp_path / "runs" / f"seed-{seed}", "reward") for seed in (1, 2))
    page, url = tab(), viewer(tmp_path / "runs").url
    page.goto(url)
    found = until(lambda: series(page, "Reward"))
    assert list(found) == ["reward"]
    assert [y for _, y in found["reward"]] == pytest.approx(
        [(a + b) / 2 for (_, a), (_, b) in zip(one, two, strict=True)]
    )
    page.goto(f"{url}/?run=seed-1")
    assert until(lambda: series(page, "Reward")) == {"reward": one}
    # of several a page of one names its run
    for chosen, title in (("", "Completions: seed-2"), ("?run=seed-1", "Completions")):
        page.goto(f"{url}/completions{chosen}")
        assert page.inner_text(".view-title") == title
    page.goto(f"{url}/?run=seed-1&smooth=0.5")
    until(lambda: series(page, "Reward"))
    page.evaluate("view.address({ from: 2, to: 5 })")  # as a zoom does
    page.get_by_label("runs").click()
    page.get_by_role("option", name="seed-2").click()
    page.keyboard.press("Escape")
    page.wait_for_url("**/?smooth=0.5&from=2&to=5&run=seed-1&run=seed-2")


@pytest.mark.long
def test_no_page_is_wider_than_the_window_and_keys_go_to_each(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], made: Path
) -> None:
    page, url = tab(400, "dark"), viewer(made).url
    page.goto(url)
    links = until(
        lambda: page.eval_on_selector_all(
            "[data-go]", "all => all.map((one) => [one.dataset.go, one.pathname])"
        )
    )
    assert len(links) == 5
    for key, path in (*links[1:], links[0]):  # it is at the first
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(lambda now, path=path: urlsplit(now).path == path)
        page.wait_for_load_state("networkidle")
        assert query(page) == {"run": "a run"}
        for width in (1280, 400):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate("document.body.classList.contains('body--dark')")


def test_the_keys_are_listed_and_the_theme_is_kept(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], made: Path
) -> None:
    page = tab(theme="light")
    page.goto(viewer(made).url)
    until(lambda: series(page, "Reward"))
    page.keyboard.press("?")
    assert {"g o", "t", "p"} <= set(
        page.locator("dialog.view-help div").evaluate_all(
            "all => all.map((one) => [...one.querySelectorAll('kbd')].map((key) => key.textContent).join(' '))"
        )
    )
    page.keyboard.press("Escape")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.keyboard.press("t")
    assert page.evaluate(colour) == light
    page.keyboard.press("t")
    until(lambda: page.evaluate(colour) != light)
    page.reload()
    until(lambda: series(page, "Reward"))
    until(lambda: page.evaluate(colour) != light)


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


def test_damage_is_said_in_one_line(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], made: Path
) -> None:
    with (made / "logging.jsonl").open("a") as file:
        file.write('\0\0\0\n{"step": 31, "loss": 1}\n{"step": 32, "lo')
    page = tab()
    page.goto(viewer(made).url)
    until(lambda: series(page, "Loss")["loss"][-1] == [31, 1])
    assert page.locator(".view-problem").all_inner_texts() == [
        "a run: logging.jsonl: 1 damaged line is left out",
        "a run: logging.jsonl: the last line is half-written, and left out",
    ]
    with (made / "logging.jsonl").open("a") as file:
        file.write('ss": 2}\n')
    until(
        lambda: (
            page.locator(".view-problem").all_inner_texts()
            == ["a run: logging.jsonl: 1 damaged line is left out"]
        )
    )


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
    assert page.evaluate(CONTRAST) >= 4.5
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


CONTRAST = """() => {
  const light = (text) => {
    const parts = text.match(/[0-9.]+/g).slice(0, 3).map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const frame = document.querySelector(".view-verdict");
  const page = light(getComputedStyle(frame).backgroundColor);
  const found = [...frame.querySelectorAll("h2, p, summary")].map((one) => light(getComputedStyle(one).color));
  return Math.min(...found.map((ink) => (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05)));
}"""


@pytest.mark.long
def test_two_tabs_follow_a_run_until_its_folder_is_gone(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], made: Path
) -> None:
    other = make_run(made.parent / "another", steps=3)
    page, second, url = tab(), tab(), viewer(made, other).url
    for one in (page, second):
        one.goto(f"{url}/?run=a run")
        until(lambda one=one: series(one, "Loss"))
    for step in (31, 32):
        with (made / "logging.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": 5}) + "\n")
        for one in (page, second):
            until(lambda one=one, step=step: series(one, "Loss")["loss"][-1] == [step, 5], 10)
    shutil.rmtree(made)
    for one in (page, second):
        until(lambda one=one: "was removed" in one.inner_text(".view-problems"))
        assert series(one, "Loss")["loss"][-1] == [32, 5]  # what was read stays
    page.goto(url)
    until(lambda: series(page, "Loss"))
    assert page.locator(".view-problem").all_inner_texts() == [
        f"{made}: there is no such folder any more"
    ]


def test_what_the_curves_mean_is_below_them(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], made: Path
) -> None:
    page = tab()
    page.goto(viewer(made).url)
    page.click("text=what the curves mean")
    shown = until(lambda: page.locator("details:has-text('what the curves mean')").inner_text())
    assert "mean reward of the completions" in shown and "explained_variance" not in shown


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


@pytest.mark.long
def test_new_charts_take_the_window_of_those_that_are_there(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], made: Path
) -> None:
    page, url = tab(), viewer(made).url
    page.goto(f"{url}/?from=10&to=20")
    until(lambda: series(page, "Reward"))
    page.locator(".view-chart[data-ready]").first.dblclick(position={"x": 150, "y": 100})
    until(lambda: query(page) == {})
    page.get_by_label("find a metric").fill("reward_std")
    until(lambda: series(page, "Spread of rewards") and not series(page, "Loss"))
    page.get_by_label("find a metric").fill("")
    until(lambda: series(page, "Loss"))
    assert zoom(page, "Loss") == (0, 30)


def _append(run: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with (run / "logging.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
