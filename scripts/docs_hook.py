"""What `make docs` adds to MkDocs: the site has the layout of the repository, so that links which GitHub follows lead to
the same place in it.

Pages are all tracked Markdown files. A tracked file of another kind that a page names, in a link or as a path in
backticks, gets a page with its text, outside the navigation and the search.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
TRACKED = set(subprocess.check_output(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"], text=True).split())
PAGES = {name for name in TRACKED if name.endswith(".md") and not name.startswith(".")}
PICTURES = (".png", ".svg")
# A fence, a link, or a path in backticks that is not the text of a link.
NAMED = re.compile(
    r"^```.*?^```|\]\((?P<link>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)|(?<!\[)`(?P<path>[\w./-]+\.[a-z]+)`",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".jinja": "jinja"}


def on_files(files: Files, config: Any) -> Files:
    site = [file for file in files if file.src_dir != config.docs_dir]  # the theme's
    texts = {name: (ROOT / name).read_text() for name in sorted(PAGES)}
    for name, text in texts.items():
        site.append(File.generated(config, name, content=text))
    for name in sorted(TRACKED):
        if name.startswith("docs/") and name.endswith(PICTURES):
            site.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name in sorted({target for page, text in texts.items() for target in sources(page, text)}):
        fence = f"~~~~ {LANGUAGES.get(Path(name).suffix, 'text')}\n{(ROOT / name).read_text()}\n~~~~"
        page = f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n{fence}\n"
        site.append(File.generated(config, f"{name}.md", content=page, inclusion=InclusionLevel.NOT_IN_NAV))
    return Files(site)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    name = page.file.src_uri
    if name not in PAGES:
        return markdown
    folder = posixpath.dirname(name)

    def to_the_page(found: re.Match[str]) -> str:
        target = named(folder, found)
        if target is None:
            return found[0]
        href = posixpath.relpath(target if target in PAGES else f"{target}.md", folder or ".")
        return f"]({href}{found['anchor'] or ''})" if found["link"] else f"[{found[0]}]({href})"

    return NAMED.sub(to_the_page, markdown)


def sources(page: str, text: str) -> set[str]:
    """The tracked files that a page names and that are no pages."""
    found = {named(posixpath.dirname(page), match) for match in NAMED.finditer(text)}
    return {name for name in found if name is not None and name not in PAGES}


def named(folder: str, found: re.Match[str]) -> str | None:
    """The tracked file that a match names, seen from the folder of its page or (in backticks) from the root; no picture."""
    if found["link"]:
        candidates = [posixpath.normpath(posixpath.join(folder, found["link"]))]
    elif found["path"] and ("/" in found["path"] or folder not in ("", "docs")):
        candidates = [posixpath.normpath(posixpath.join(folder, found["path"])), found["path"]]
    else:
        candidates = []
    return next((name for name in candidates if name in TRACKED and not name.endswith(PICTURES)), None)
