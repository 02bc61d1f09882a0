"""How soon `swift view` shows something of a large run in a browser, and how much memory it takes.

    python benchmarks/view_pages.py              # 1,000,000 completions, 1.4 GiB
    python benchmarks/view_pages.py 100000

Each page is opened in Chromium, one after another. Seconds are until its first chart or row is there; memory is the
most that the server's process has had since then, read every 5 ms.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.table import Table
from view_reading import GROUPS, PER_GROUP, MostMemory, row, some_words

CHART, ROW = ".view-chart[data-ready]", "table tr"
PAGES = {
    "/completions": ROW,
    "/": CHART,
    "/distributions": CHART,
    "/prompt": ROW,
    "/time": "h1, .view-row",
    "/completions?q=needle": "table mark",
    "/completions?where=target<100": ROW,
    "/completions?sort=reward&desc=1": ROW,
}
MOST_S = 200.0
QUIET_S = 1.5  # without work, after which a page is done


def write_run(folder: Path, count: int) -> None:
    """Writes what the page reads: args.json, completions.jsonl and a logging.jsonl of as many steps."""
    chance = random.Random(0)
    words = some_words(chance)
    args = {"model": "made up", "num_generations": PER_GROUP}
    about = {"args": args, "run_dir": str(folder), "command": ["swift", "rlhf"], "versions": {}}
    (folder / "args.json").write_text(json.dumps(about))
    with (folder / "completions.jsonl").open("w", encoding="utf-8") as file:
        for place in range(count):
            file.write(json.dumps(row(place, words, chance), ensure_ascii=False) + "\n")
    with (folder / "logging.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, count // (GROUPS * PER_GROUP) + 1):
            reward = 0.3 + 0.1 * chance.gauss(0, 1)
            file.write(json.dumps({"step": step, "reward": reward, "entropy": 0.5}) + "\n")


def seconds_of_work(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def opened(page: Page, url: str, sign: str, process: psutil.Process) -> tuple[float, float]:
    """Returns the seconds until the sign is there, and the most bytes until the server does nothing more."""
    memory = MostMemory(process)
    try:
        begun = time.monotonic()
        page.goto(url)
        page.locator(sign).first.wait_for()
        first = time.monotonic() - begun
        worked = time.monotonic()
        before = seconds_of_work(process)
        while time.monotonic() - worked < QUIET_S and time.monotonic() - begun < MOST_S:
            time.sleep(0.25)
            now = seconds_of_work(process)
            if now - before > 0.1:
                worked = time.monotonic()
            before = now
    finally:
        most = memory.end()
    return first, most


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    table = Table("page", "first seen, s", "most memory, MB")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        write_run(run, count)
        words = [sys.executable, "-m", "swift_r1", "view", str(run)]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split("http://")[1].split()[0].rstrip(";/")
            with sync_playwright() as playwright:
                chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"))
                for path, sign in PAGES.items():
                    context = chromium.new_context(viewport={"width": 1440, "height": 900})
                    context.set_default_timeout(1000 * MOST_S)
                    first, most = opened(
                        context.new_page(), f"http://{url}{path}", sign, psutil.Process(server.pid)
                    )
                    table.add_row(path, f"{first:.2f}", f"{most / 1e6:.0f}")
                    context.close()
        finally:
            server.terminate()
            server.wait(20)
    Console().print(table)


if __name__ == "__main__":
    main()
