"""The pages of docs/ that are made from code: `python scripts/reference` writes them, with `--check` it says which are
not what the code says, and ends with 1 where there are any."""

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
PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags_page.page,
    "http.md": http_page.page,
    "python.md": python_page.page,
    "metrics.md": metrics_page.page,
    "files.md": files_page.page,
}


def main(words: list[str]) -> int:
    stale = [name for name, page in PAGES.items() if _differs(DOCS / name, page())]
    if words == ["--check"]:
        for name in stale:
            print(f"docs/{name} is not what the code says: run python scripts/reference")
        return int(bool(stale))
    for name in stale:
        (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"docs/{name} was written")
    return 0


def _differs(path: Path, text: str) -> bool:
    return not path.is_file() or path.read_text(encoding="utf-8") != text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
