"""Every page in a browser at three widths, light and dark: what stands on the first screen, that nothing is cut off, what
axe-core finds, and that the keyboard alone reaches everything. SWIFT_R1_PICTURES names a folder to keep the pictures in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import until
from tests.lab.diagnosis.recorded import run_folder
from tests.lab.runs.made import make_run
from tests.lab.runs.timed import write_spans
from tests.lab.view.conftest import Viewer

SIZES = ((1440, 900), (390, 844), (1920, 1080))
THEMES = ("light", "dark")
_PAGES = ("/", "/completions", "/group?step=1&group=0", "/tokens?step=1")
PAGES = (*_PAGES, "/time", "/nosuchpage")
_IS_DARK = "document.body.classList.contains('body--dark')"
_CONTROLS = """() => {
  const wanted = "a[href], button, input, summary, [tabindex='0']";
  const known = [...document.querySelectorAll(wanted)].filter((one) => one.getClientRects().length && !one.disabled
    && one.tabIndex >= 0 && !one.closest("details:not([open]) > :not(summary)"));
  known.forEach((one, number) => (one.dataset.reached = number));
  return known.map((one) => one.outerHTML.slice(0, 120));
}"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run with a page of everything, and two that are compared on the overview."""
    made = make_run(tmp_path / "runs" / "everything", steps=8)
    write_spans(made, "rank-0", 8)
    for name, recorded in (("rising", "demo, seed 0"), ("silent", "impossible problems")):
        run_folder(tmp_path / "runs" / name, recorded)
    return tmp_path / "runs"


@pytest.mark.long
def test_the_keyboard_reaches_every_control(
    viewer: Callable[..., Viewer], tab: Callable[..., Any], runs: Path
) -> None:
    page = tab()
    page.goto(f"{viewer(runs).url}/?run=rising&run=silent")
    page.locator(".view-chart[data-ready]").first.wait_for()
    known = page.evaluate(_CONTROLS)
    reached = set()
    for _ in range(len(known) + 5):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.dataset.reached ?? ''"))
    missed = [html for number, html in enumerate(known) if str(number) not in reached]
    assert len(known) > 30 and missed == []


def serious(axe: Any, page: Any) -> list[str]:
    """What axe-core finds that keeps somebody from using the page."""
    return [
        f"{one['id']}: {one['nodes'][0]['html']}"
        for one in axe.run(page).response["violations"]
        if one["impact"] in ("serious", "critical")
    ]


@pytest.fixture(params=["chromium", "firefox"])
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "chromium":
        yield request.getfixturevalue("chromium")
        return
    found = shutil.which("firefox")
    if found is None:
        pytest.skip("there is no firefox here: Debian's package of that name, 159 or newer")
    firefox = request.getfixturevalue("playwright").firefox
    running = firefox.launch(executable_path=found, channel="moz-firefox")
    yield running
    running.close()


@pytest.mark.long
def test_every_page_at_three_widths_light_and_dark(
    viewer: Callable[..., Viewer], browser: Any, runs: Path, tmp_path: Path
) -> None:
    kept = Path(os.environ.get("SWIFT_R1_PICTURES") or tmp_path / "pictures")
    kept.mkdir(parents=True, exist_ok=True)
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    url = viewer(runs).url
    name = browser.browser_type.name
    page = browser.new_context().new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    for path in PAGES:
        page.goto(f"{url}{path}{'&' if '?' in path else '?'}run=everything")
        page.wait_for_load_state("networkidle")
        for width, height in SIZES:
            page.set_viewport_size({"width": width, "height": height})
            for theme in THEMES:
                page.emulate_media(color_scheme=theme)
                until(lambda theme=theme: page.evaluate(_IS_DARK) == (theme == "dark"), 10)
                words = path.partition("?")[0].strip("/") or "overview"
                picture = kept / f"{words}-{width}-{theme}-{name}.png"
                page.screenshot(path=picture)
                assert picture.stat().st_size > 5_000, f"{picture} shows nothing"
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path
                if width == SIZES[0][0]:
                    assert serious(axe, page) == [], (path, theme)
    assert faults == []
