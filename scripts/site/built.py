"""What is wrong with a built site: links and pictures that lead nowhere, and what a browser fetches from elsewhere."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# fetched without a click
OF_A_PAGE = {"src": ("script", "img", "iframe", "source"), "href": ("link",)}
ELSEWHERE = "https:", "http:", "//"


class Page(HTMLParser):
    """The ids of a page, its links, and what it fetches."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif value and tag in OF_A_PAGE.get(name, ()):
                self.fetched.append(value)
            elif value and name == "href":
                self.links.append(value)


def faults_of_site(site: Path) -> list[str]:
    pages = {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    faults = []
    for path, page in pages.items():
        here = path.relative_to(site)
        faults += [f"{here}: fetches {url}" for url in page.fetched if url.startswith(ELSEWHERE)]
        for url in (*page.links, *page.fetched):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                faults.append(f"{here}: {url} leads nowhere")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].ids
            ):
                faults.append(f"{here}: {url} leads to no heading")
    return faults
