"""Makes the pictures of docs/seeing-a-run.md, and README's moving one, from a run of the demo:
`.venv/bin/python scripts/screenshots.py [RUN]`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from swift_r1.record.folder import find_runs
from swift_r1.record.token_reader import TokenRecord

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
SWIFT = (sys.executable, "-m", "swift_r1")
HEIGHT = 900
STEPS = 4  # the last, of which the longest completion that was learned from is shown
SETTLE_MS = 1500
TOUR = ("view-overview", "view-completions", "view-group", "view-tokens")
TOUR_SIZE, TOUR_MS, TOUR_COLOURS = (960, 600), 2500, 64


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("there is no chromium: apt-get install chromium", file=sys.stderr)
        return 2
    run = find_runs(sys.argv[1:] or ["output/countdown_demo"])[-1].path
    with served(run) as url, sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for name, path in pages(run).items():
            picture(browser, url + path, name)
        picture(browser, url, "view-overview-dark", theme="dark")
        picture(browser, url, "view-overview-narrow", width=400)
        report = IMAGES / "report.html"
        try:
            subprocess.run([*SWIFT, "report", str(run), "-o", str(report)], check=True)
            picture(browser, report.as_uri(), "report")
        finally:
            report.unlink(missing_ok=True)
        browser.close()
    tour(IMAGES / "tour.gif")
    return 0


def tour(file: Path) -> None:
    """Makes a moving picture of some of the others, which are there: their upper parts, one after another."""
    frames = []
    for name in TOUR:
        with Image.open(IMAGES / f"{name}.png") as picture:
            whole = picture.convert("RGB")
        height = whole.width * TOUR_SIZE[1] // TOUR_SIZE[0]
        frame = Image.new("RGB", (whole.width, height), whole.getpixel((0, whole.height - 1)))
        frame.paste(whole)
        frames.append(frame.resize(TOUR_SIZE, Image.Resampling.LANCZOS).quantize(TOUR_COLOURS))
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=TOUR_MS, loop=0)
    print(file)


def pages(run: Path) -> dict[str, str]:
    """The name of each picture, and the address of what it shows."""
    record = TokenRecord(run)
    listed = [row for step in record.steps()[-STEPS:] for row in record.completions(step)]
    whole = [record.completion(one.round_step, one.request_id, one.number)[-1] for one in listed]
    row = max(whole, key=lambda one: (any(one.advantages or ()), len(one.token_ids or ())))
    token = {
        "step": row.round_step,
        "request": row.request_id,
        "number": row.number,
        "colour": "entropy",
    }
    return {
        "view-overview": "/?smooth=0.6",
        "view-completions": "/completions?" + urlencode({"sort": "reward", "desc": 1}),
        "view-group": "/group?" + urlencode({"step": row.round_step, "group": row.group}),
        "view-tokens": "/tokens?" + urlencode(token),
        "view-time": "/time",
    }


def picture(browser: Browser, url: str, name: str, width: int = 1280, theme: Any = "light") -> None:
    page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=theme)
    page.goto(url, wait_until="networkidle")
    page.wait_for_timeout(SETTLE_MS)
    # What a run is has paths of this machine.
    page.evaluate(
        "document.querySelectorAll('.view-run details').forEach((one) => { one.open = false; })"
    )
    bottoms = page.eval_on_selector_all(
        ".view-main *", "all => all.map((one) => one.getBoundingClientRect().bottom + scrollY)"
    )
    page.set_viewport_size(
        {"width": width, "height": min(HEIGHT, int(max(bottoms, default=HEIGHT)) + 16)}
    )
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=IMAGES / f"{name}.png")
    page.close()
    print(IMAGES / f"{name}.png")


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Yields the address of the run's page."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if name != "SWIFT_API_KEY"}
    process = subprocess.Popen([*SWIFT, "view", str(run), "--port", str(port)], env=environ)
    try:
        client = httpx.Client(transport=httpx.HTTPTransport(retries=8), trust_env=False)
        client.get(f"http://127.0.0.1:{port}/health").raise_for_status()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


if __name__ == "__main__":
    sys.exit(main())
