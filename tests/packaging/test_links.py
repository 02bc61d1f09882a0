"""What the pages and the public files point to is there: files, headings, targets of make, the version."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    ROOT / name
    for name in subprocess.check_output(["git", "-C", ROOT, "ls-files"], text=True).splitlines()
]
PAGES = sorted(path for path in FILES if path.suffix == ".md")
WORKFLOWS = sorted(path for path in FILES if path.parent.name == "workflows")
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the page's headings, and the addresses that it names itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*?)\s*$", text, re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower() for heading in headings]
    named = re.findall(r'<a id="([^"]+)"></a>', text)
    return {*named, *(re.sub(r"[^\w\- ]", "", one).replace(" ", "-") for one in plain)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not str(target).endswith(SITE["MADE"]), f"{link} is not in git"
        assert not anchor or anchor in anchors(target), link


# Those of the past name the commands of their day.
TODAY = [page for page in PAGES if page.parent.name != "results" and page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", [*TODAY, *WORKFLOWS], ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_of_make(page: Path) -> None:
    lines = re.findall(
        r"`make ([^`\n]*)`|^(?: {4}|.*- run: )make (.*)", page.read_text(), re.MULTILINE
    )
    named = {re.split(r" [A-Z#&-]", one or other)[0] for one, other in lines}
    assert {
        word for words in named for word in words.split() if re.fullmatch("[a-z][a-z0-9-]*", word)
    } <= TARGETS


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version


SITE = runpy.run_path(str(ROOT / "scripts" / "site" / "pages.py"))


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert SITE["faults_of_navigation"](nav, SITE["tracked"]()) == []
