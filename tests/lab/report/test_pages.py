"""A report as HTML and as Markdown: whole, the same bytes, and nothing that a model wrote means anything in it."""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

from swift_r1.lab.report.blocks import (
    LONGEST,
    CodeBlock,
    Figures,
    Note,
    Passage,
    Passages,
    Report,
    Section,
    Table,
    printable,
)
from swift_r1.lab.report.figures import figure
from swift_r1.lab.report.html import html
from swift_r1.lab.report.markdown import markdown
from swift_r1.lab.runs.curves import Curve
from tests.lab.html import Reader

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[here](http://evil.example) ![x](http://evil.example/y.png) <http://evil.example>",
    "https://evil.example www.evil.example HTTP://EVIL.example",
    "```\n````\n# a heading\n- a list\n| a | table |\n```",
    "</pre></section><h1>mine</h1>",
    "{{ 7 * 7 }} {% raw %} $x$ ~~no~~ **bold** _it_ `code` &lt; \\",
    "\x00\x1b[31m\u202eabc\ud800\ufffe\r",
    "1. one\n+ two\n===\n--- ",
]


def report(*texts: str) -> Report:
    drawn = [
        figure(
            "Reward",
            [
                Curve(
                    texts[0], 0, "reward", 0, 0, [(1, 0.1), (2, 0.5)], [(1, 0, 0.2), (2, 0.4, 0.6)]
                ),
                Curve("_$a$", 1, "reward", 1, 1, [(1, 0), (2, None)]),
            ],
        ),
        figure(texts[0], [Curve("right", 0, "reward", 1, 0, [(1, 0.2), (2, 0.4)])], texts[0]),
    ]
    sections = [
        Section(
            text, [Note(text), CodeBlock(text), Table([text, "n"], [[text, "1.5"]]), Figures(drawn)]
        )
        for text in texts
    ]
    passages = [Passages(text, [Passage(text, text)], prompt=text) for text in texts]
    return Report(texts[0], [*sections, Section("Completions", passages)], problems=texts)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_wrote_is_text_in_html(text: str) -> None:
    page = Reader(html(report(text)))
    own = Reader(html(report("plain")))
    assert page.tags == own.tags
    assert [name for name, _ in page.attributes] == [name for name, _ in own.attributes]
    assert printable(text) in page.text


@pytest.mark.long
@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_wrote_is_text_in_markdown(text: str) -> None:
    reader = MarkdownIt("gfm-like", {"linkify": False})
    page, own = (
        Reader(reader.render(markdown(report(one), "files")[0])) for one in (text, "plain")
    )
    assert page.tags == own.tags
    assert printable(text).rstrip() in page.text
    source = re.sub(
        r"^(`{3,}).*?^\1$", "", markdown(report(text), "files")[0], flags=re.DOTALL | re.MULTILINE
    )
    # which GitHub makes a link of
    assert not re.search(r"https?://|www\.\w", source, re.IGNORECASE)


def test_nothing_is_fetched() -> None:
    page = html(report("plain"))
    assert "<script" not in page and "@import" not in page
    outside = [
        value for name, value in Reader(page).attributes if name in ("src", "href", "xlink:href")
    ]
    assert outside and all(value is not None and value.startswith("#") for value in outside)


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = printable("a" * 5_000_000 + "end")
    assert len(text) < LONGEST + 50 and text.endswith("end") and "4,997,003 characters" in text
