"""What the search of a built site finds beside its headings: each flag, by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FLAGS = "docs/flags.html"
ROW = re.compile(
    r'<tr>\s*<td><a id="(?P<id>[^"]*--\w+)"></a>(?P<names>.*?)</td>'
    r"\s*<td>.*?</td>\s*<td>.*?</td>\s*<td>(?P<meaning>.*?)</td>",
    re.DOTALL,
)
TAG = re.compile(r"<[^>]+>")


def add_flags(site: Path) -> int:
    """Adds every flag to the index, and returns how many there are."""
    index = json.loads((site / "search.json").read_text())
    found = [*flags((site / FLAGS).read_text())]
    index["items"] += found
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    (site / "search.json").write_text(text)
    (site / "search.js").write_text(f"var __index = {text}")  # of a page that was opened as a file
    return len(found)


def flags(page: str) -> list[dict[str, Any]]:
    """Returns an item for each flag of docs/flags.html. Its name stands in all that is searched, which is what the
    search goes by, and the shorter one comes first: `--num_generations` before `--num_generations_eval`."""
    found = []
    for row in ROW.finditer(page):
        command = row["id"].partition("--")[0]
        names = TAG.sub("", row["names"])
        found.append(
            {
                "location": f"{FLAGS}#{row['id']}",
                "level": 4,
                "title": f"{names} ({command})" if command else names,
                "text": f"<code>{names}</code>: {row['meaning']}",
                "path": [names],
                "tags": [],
            }
        )
    return sorted(found, key=lambda item: len(item["title"]))
