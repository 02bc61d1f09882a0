"""The pages of docs/ that are made from code: `python scripts/reference` writes them. With `--check` it says which of
those in git are not what the code says, and ends with 1 where there are any; with `--site` it writes the others alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import files_page
import flags_page
import http_page
import metrics_page
import python_page

DOCS = Path(__file__).resolve().parents[2] / "docs"
IN_GIT: dict[str, Callable[[], str]] = {"flags.md": flags_page.page, "files.md": files_page.page}
FOR_THE_SITE: dict[str, Callable[[], str]] = {
    "http.md": http_page.page,
    "python.md": python_page.page,
    "metrics.md": metrics_page.page,
}


def main(words: list[str]) -> int:
    checks = words == ["--check"]
    pages = {} if words == ["--site"] else dict(IN_GIT)
    if not checks:
        pages |= FOR_THE_SITE
    texts = {name: page() for name, page in pages.items()}
    stale = {name: text for name, text in texts.items() if _differs(DOCS / name, text)}
    for name, text in stale.items():
        if checks:
            print(f"docs/{name} is not what the code says: run python scripts/reference")
        else:
            (DOCS / name).write_text(text, encoding="utf-8")
            print(f"docs/{name} was written")
    return int(checks and bool(stale))


def _differs(path: Path, text: str) -> bool:
    return not path.is_file() or path.read_text(encoding="utf-8") != text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
