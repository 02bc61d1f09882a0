"""What scripts/site adds to the pages: titles in the place of file names, and flags that the search finds."""

from __future__ import annotations

import sys

from tests.docs.shown import ROOT

sys.path.append(str(ROOT / "scripts" / "site"))

from pages import titles, with_titles
from searched import flags

NAV = [{"Home": "README.md"}, {"First": [{"Install it": "docs/install.md"}]}]


def row(address: str, names: str, meaning: str) -> str:
    cells = (f'<a id="{address}"></a>{names}', "integer", "<code>8</code>", meaning)
    return f"<tr>\n{''.join(f'<td>{cell}</td>' for cell in cells)}\n</tr>"


def test_a_link_that_is_called_after_a_file_has_the_title_of_its_page() -> None:
    named = titles(NAV)
    assert named == {"README.md": "Home", "docs/install.md": "Install it"}
    for page, text, shown in (
        (
            "docs/a.md",
            "see [install.md](install.md#a-wheel).",
            "see [Install it](install.md#a-wheel).",
        ),
        ("README.md", "[install.md](docs/install.md)", "[Install it](docs/install.md)"),
        ("docs/a.md", "[by hand](install.md), [b.md](b.md)", "[by hand](install.md), [b.md](b.md)"),
        ("docs/a.md", "```\n[install.md](install.md)\n```", "```\n[install.md](install.md)\n```"),
    ):
        assert with_titles(page, text, named) == shown


def test_a_flag_is_found_by_its_name_and_before_longer_ones() -> None:
    page = row(
        "--num_generations_eval", "<code>--num_generations_eval</code>", "as --num_generations"
    )
    page += row("--num_generations", "<code>--num_generations</code>", "completions per prompt")
    page += row("eval--n", "<code>--n</code>, <code>--num_generations</code>", "per question")
    page += "<tr><td>no flag</td><td></td><td></td><td></td></tr>"
    first, *others = flags(page)
    assert first["title"] == "--num_generations"
    assert first["location"] == "docs/flags.html#--num_generations"
    assert "completions per prompt" in first["text"]
    assert [one["title"] for one in others] == [
        "--num_generations_eval",
        "--n, --num_generations (eval)",
    ]
