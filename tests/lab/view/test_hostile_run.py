"""A run in which everything is an attack, in a real browser; and paths that lead out of a run's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tests.security.hostile import ALL, NAME, TAKEN, hostile_run

PATHS = (
    "/",
    "/completions",
    "/group?step=1&group=0",
    "/tokens?step=1",
    "/time",
    "/completions?prompt=countdown:1",
)
OUT = (
    "../..",
    "../../../../../../etc",
    "/etc",
    "..%2f..",
    "....//....//etc",
    "%2e%2e/%2e%2e",
    ".",
    "\x00",
)
RAW = (
    b"/static/../../../../../../etc/passwd",
    b"/static/..%2f..%2f..%2f..%2fetc/passwd",
    b"//etc/passwd",
)
ACTS = "iframe, img[src=x], [onerror], [onload], [onfocus], [onmouseover]"


def test_nothing_of_a_run_acts_in_its_pages(
    viewer: Any, tab: Callable[..., Any], tmp_path: Path
) -> None:
    run = hostile_run(tmp_path / "runs")
    page, url = tab(), viewer(run.parent).url
    said: list[str] = []
    page.on("dialog", lambda one: said.append(one.message) or one.dismiss())
    hostile = quote(ALL)
    for path in (
        *PATHS,
        f"/completions?q={hostile}&where={hostile}&sort={hostile}",
        f"/completions?prompt={hostile}",
    ):
        more = "&" if "?" in path else "?"
        page.goto(f"{url}{path}{more}run={quote(NAME)}")
        page.wait_for_function("document.body.innerText.length > 100")
        page.wait_for_timeout(300)  # for what would act a little later
        assert page.title() != TAKEN, path
        assert page.evaluate("(those) => document.querySelectorAll(those).length", ACTS) == 0, path
    assert said == []


def test_no_path_leads_out_of_the_runs(viewer: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("pl4nted")
    (tmp_path / "args.json").write_text('{"args": {"model": "pl4nted"}}')
    (tmp_path / "completions.jsonl").write_text('{"step": 1, "completion": "pl4nted"}\n')
    run = hostile_run(tmp_path / "runs")
    with httpx.Client(base_url=viewer(run.parent).url, trust_env=False, timeout=60) as http:
        for out in (quote(one) for one in OUT):
            for path in ("/?run={}", "/static/{}/secret.txt"):
                assert "pl4nted" not in http.get(path.format(out)).text
        for page in ("/completions", "/tokens"):
            assert "pl4nted" not in http.get(f"{page}?run={quote(OUT[0])}").text
        request = http.build_request("GET", "/static/x")
        for raw in RAW:
            request.url = request.url.copy_with(raw_path=raw)
            assert "root:" not in http.send(request).text
