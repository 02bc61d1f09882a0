"""The time page in a browser: what it draws is what the files say, in the window that the address names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab.runs.made import make_run
from tests.lab.runs.timed import START, write_events, write_lane, write_spans

_DRAWN = """() => {
  const place = [...document.querySelectorAll(".view-chart")].find((one) => one.ariaLabel.startsWith("what each lane"));
  const option = place && getElement(place.id.slice(1))?.chart?.getOption();
  if (!option) return null;
  const row = (series, item) => [option.yAxis[0].data[item[2]], series.name, ...item];
  const drawn = option.series.filter((series) => series.type === "custom");
  const spans = drawn.flatMap((series) => series.data.map((item) => row(series, item)));
  const lanes = (one) => one.coords.map(([x, y]) => [option.yAxis[0].data[y], x]);
  const arrows = option.series.find((series) => series.name === "arrows").data.map(lanes);
  const { start, end, startValue, endValue } = option.dataZoom[0];
  const marks = option.series[0].markLine.data.map((one) => one.name);
  return { spans, marks, arrows, all: start <= 0 && end >= 100, window: [startValue, endValue] };
}"""


def drawn(page: Any, until: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
    """What the chart draws, once it is so: lane, name, start, end, place, step and count of each rectangle."""
    for _ in range(300):
        found: dict[str, Any] | None = page.evaluate(_DRAWN)
        if found and found["spans"] and until(found):
            return found
        page.wait_for_timeout(100)
    raise AssertionError(f"not within 30 s: {found}")


def expected(lane: str, rows: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {
        (
            lane,
            row["name"],
            round(row["start"] - START, 6),
            round(row["end"] - START, 6),
            row["step"],
        )
        for row in rows
    }


def spans_of(found: dict[str, Any]) -> set[tuple[Any, ...]]:
    assert {count for *_, count in found["spans"]} <= {1}
    return {(lane, name, start, end, step) for lane, name, start, end, _, step, _ in found["spans"]}


def test_what_is_drawn_is_what_the_files_say(viewer: Any, tab: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", exit_code=None)
    lanes = {lane: write_spans(run, lane, 5) for lane in ("rank-0", "rank-1", "server-0")}
    others = ((11, 2, "server_joined"), (12, 3, "server_left"))
    write_events(run, (0, 0, "started"), (9, 2, "server_lost"), (10, 2, "server_restored"), *others)
    page, url = tab(), viewer(run).url
    page.goto(f"{url}/time")
    found = drawn(page)
    assert spans_of(found) == set().union(*(expected(lane, rows) for lane, rows in lanes.items()))
    kinds = [mark.partition(":")[0] for mark in found["marks"]]
    servers = ["server lost", "server restored", "server joined", "server left"]
    assert kinds == ["started", *servers, "killed"] and found["all"]
    table = page.locator("table").first
    assert [
        cell.strip() for cell in table.locator("tr").nth(1).locator("td").all_inner_texts()
    ] == [*("rank-0", "0.0", "25.0", "25.0", "25.0", "25.0")]

    # Dragging shows a part, and the address is a link to it.
    box = page.locator(".view-chart").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.6)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.6, steps=4)
    page.mouse.up()
    part = drawn(page, lambda one: not one["all"] and len(one["spans"]) < 60)
    start, end = part["window"]
    inside = {span for span in spans_of(found) if span[3] >= start and span[2] <= end}
    assert spans_of(part) == inside and 0 < len(inside) < 60
    page.wait_for_function("location.search.includes('to=')")
    other = tab(width=400, theme="dark")
    other.goto(page.url)
    again = drawn(other, lambda one: not one["all"])
    assert spans_of(again) == inside and abs(again["window"][0] - start) < 1e-3
    assert other.evaluate("document.documentElement.scrollWidth") <= 400

    for key, window in (("0", (0, 20)), ("+", (5, 15)), ("ArrowRight", (10, 20)), ("-", (0, 20))):
        other.keyboard.press(key)
        moved = drawn(
            other, lambda one, window=window: [round(end, 3) for end in one["window"]] == [*window]
        )
        assert moved["all"] == (window == (0, 20))
    assert "from=" not in other.url


def test_a_run_that_goes_on_is_followed_and_a_long_one_has_few_rectangles(
    viewer: Any, tab: Any, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    write_spans(run, "rank-0", 2)
    page = tab()
    page.goto(f"{viewer(run).url}/time")
    assert len(drawn(page)["spans"]) == 8
    write_spans(run, "rank-0", 3000, 0.01, START + 8)
    found = drawn(page, lambda one: len(one["spans"]) > 8)
    assert len(found["spans"]) <= 2000 and sum(count for *_, count in found["spans"]) == 12_008


def test_idle_time_slow_steps_and_who_answers_whom(viewer: Any, tab: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rank, server, weights = [], [], []
    for step, length in ((1, 2.0), (2, 6.0), (3, 2.0)):
        now = 10.0 * (step - 1)
        rank += [(now, now + length, "generate", step), (now + 8, now + 9, "sync", step)]
        server.append((now + 0.5, now + length - 0.5, "generate", step))
        weights.append((now + 8.25, now + 8.75, "sync", step))
    for lane, spans in (("rank-0", rank), ("server-0", server), ("server-0-weights", weights)):
        write_lane(run, lane, spans)
    page = tab()
    page.goto(f"{viewer(run).url}/time")
    found = drawn(page)["arrows"]
    assert len(found) == 9
    assert found[:2] == [[["rank-0", 0], ["server-0", 0.5]], [["server-0", 1.5], ["rank-0", 2]]]
    assert [["rank-0", 28], ["server-0-weights", 28.25]] in found
    # 13 of the 29 seconds between the first sign and the last are spent
    assert page.inner_text(".view-idle") == "rank-0 was idle for 55.2 %"
    slowest = page.locator("table", has_text="Slowest steps").locator("tr").nth(1)
    assert slowest.locator("td").all_inner_texts() == ["2", "7.00", "generate +4.00 s"]
    slowest.locator("a").click()
    page.wait_for_url("**from=10.0&to=19.0")
    # a block keeps its colour under the mouse
    place = page.locator(".view-chart").first
    fills = "all => all.map((one) => getComputedStyle(one).fill)"
    before = place.locator("path").evaluate_all(fills)
    box = place.bounding_box()
    page.mouse.move(box["x"] + 110 + (box["width"] - 122) * 0.3, box["y"] + 57)
    page.get_by_text("6 s, step 2").wait_for()
    assert sorted(place.locator("path").evaluate_all(fills)) == sorted(before)


def test_a_run_without_times_says_so_and_two_are_one_below_the_other(
    viewer: Any, tab: Any, tmp_path: Path
) -> None:
    for name in ("one", "other"):
        run = make_run(tmp_path / "runs" / name, old=True)
        (run / "logging.jsonl").write_text("")
    write_spans(tmp_path / "runs" / "one", "rank-0", 2)
    page = tab()
    page.goto(f"{viewer(tmp_path / 'runs').url}/time")
    page.get_by_role("heading", name="one").wait_for()
    assert len(drawn(page)["spans"]) == 8
    assert page.get_by_text("This run recorded no times.").is_visible()
