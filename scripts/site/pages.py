"""What the site shows: the repository's Markdown files and pictures, in the folders that they have there.

So a link that GitHub follows leads to the same place. A tracked file of another kind that a page names, in a link or as
a path in backticks, gets a page with its text, outside the navigation and the search.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTED = ("git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard")
MADE = ("docs/http.md", "docs/metrics.md", "docs/python.md")  # by scripts/reference, and not in git
PICTURES = (".png", ".svg", ".gif")
FURNITURE = ("iframe-worker.js", "site.css")  # beside this file
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".jinja": "jinja",
}
# A fence; the end of a link; a path in backticks that is not the text of a link.
NAMED = re.compile(
    r"^```.*?^```|\]\((?P<link>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)|(?<!\[)`(?P<path>[\w./-]+\.[a-z]+)`",
    re.MULTILINE | re.DOTALL,
)


# A fence; a link whose text is the name of a page's file.
FILE_NAME = re.compile(
    r"^```.*?^```|\[[\w./-]+\.md\]\((?P<link>[^)\s#:]+\.md)", re.MULTILINE | re.DOTALL
)


def tracked() -> frozenset[str]:
    """The files of the repository, new ones that git does not ignore, and the pages that are made for the site."""
    names = subprocess.check_output(LISTED, text=True).splitlines()
    return frozenset(name for name in names if (ROOT / name).is_file()) | {*MADE}


def is_page(name: str) -> bool:
    return name.endswith(".md") and not name.startswith(".")


def page_of(name: str) -> str:
    """Where a file is shown. Folders with a dot before their name are left out of sites."""
    return name if is_page(name) else "/".join(part.lstrip(".") for part in name.split("/")) + ".md"


def write_pages(folder: Path, named: Mapping[str, str]) -> None:
    """Writes all that the site is built from into a folder, which is emptied first; `named` are the titles of pages."""
    shutil.rmtree(folder, ignore_errors=True)
    files = tracked()
    pages = {name: (ROOT / name).read_text() for name in sorted(files) if is_page(name)}
    shown = {source for name, text in pages.items() for source in sources(name, text, files)}
    texts = {
        name: with_links(name, with_titles(name, text, named), files)
        for name, text in pages.items()
    }
    texts |= {page_of(name): source_page(name) for name in shown}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in files:
        if name.startswith("docs/") and name.endswith(PICTURES):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name in FURNITURE:
        shutil.copy(Path(__file__).with_name(name), folder / name)


def source_page(name: str) -> str:
    fence = f"~~~~ {LANGUAGES.get(Path(name).suffix, 'text')}\n{(ROOT / name).read_text()}\n~~~~"
    return f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n{fence}\n"


def with_links(name: str, text: str, files: frozenset[str]) -> str:
    """The text of a page, whose links to sources lead to their pages, and whose paths in backticks are links."""
    folder = posixpath.dirname(name)

    def to_its_page(found: re.Match[str]) -> str:
        target = named(folder, found, files)
        if target is None:
            return found[0]
        href = posixpath.relpath(page_of(target), folder or ".")
        return f"]({href}{found['anchor'] or ''})" if found["link"] else f"[{found[0]}]({href})"

    return NAMED.sub(to_its_page, text)


def with_titles(name: str, text: str, named: Mapping[str, str]) -> str:
    """The text of a page, whose links that are called after a file have the title of its page."""

    def called(found: re.Match[str]) -> str:
        if not found["link"]:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), found["link"]))
        return f"[{named[target]}]({found['link']}" if target in named else found[0]

    return FILE_NAME.sub(called, text)


def sources(name: str, text: str, files: frozenset[str]) -> set[str]:
    """The files that a page names and that are no pages."""
    found = {named(posixpath.dirname(name), match, files) for match in NAMED.finditer(text)}
    return {target for target in found if target is not None and not is_page(target)}


def named(folder: str, found: re.Match[str], files: frozenset[str]) -> str | None:
    """The file that a match names, from the folder of its page or, in backticks, from the root; not a picture."""
    path = found["link"] or found["path"] or ""
    candidates = [posixpath.normpath(posixpath.join(folder, path))]
    if found["path"]:
        candidates.append(path)
    return next(
        (one for one in candidates if path and one in files and not one.endswith(PICTURES)), None
    )


def titles(nav: object) -> dict[str, str]:
    """The titles that the `nav` of mkdocs.yml gives its pages, by their files."""
    found = {}
    for one in nav if isinstance(nav, list) else []:
        for title, below in one.items():
            found |= {below: title} if isinstance(below, str) else titles(below)
    return found


def in_navigation(nav: object) -> list[str]:
    """The pages that the `nav` of mkdocs.yml names."""
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, Mapping) else nav if isinstance(nav, list) else []
    return [name for one in below for name in in_navigation(one)]


def faults_of_navigation(nav: object, files: frozenset[str]) -> list[str]:
    listed, pages = in_navigation(nav), {name for name in files if is_page(name)}
    return [
        *(f"mkdocs.yml: {name} is not in the navigation" for name in sorted(pages - set(listed))),
        *(f"mkdocs.yml: there is no {name}" for name in sorted(set(listed) - pages)),
        *(
            f"mkdocs.yml: {name} is there twice"
            for name in sorted(set(listed))
            if listed.count(name) > 1
        ),
    ]
