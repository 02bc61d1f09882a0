"""Completions as HTML: hostile text cannot act, and every token has the colour of its number."""

from __future__ import annotations

import math
import re

import pytest

from swift_r1.lab.report import colours
from swift_r1.lab.view.coloured import (
    COLOURINGS,
    classes,
    legend_html,
    scale_of,
    token_css,
    tokens_html,
    values_of,
)
from swift_r1.lab.view.markup import markup, token_markup
from tests.lab.html import Reader

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</i></div><style>*{display:none}</style>",
    "&lt;script&gt; &amp;amp;",
    "\x1b[31mred\x1b[0m",
    "a\x00b\x7f\x9b",
    "\u202eevil\u2066x\u200b",
    "\ud800 half a pair",
    '\'" onmouseover=alert(1) x="',
    "line\r\nline\rline\u2028",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_and_does_nothing(text: str) -> None:
    for html in (
        markup(text),
        token_markup(text),
        tokens_html([text], [False], ["x"]),
    ):
        read = Reader(html)
        assert set(read.tags) <= {"b", "i", "ins", "del", "wbr", "div"}
        assert {name for name, _ in read.attributes} <= {"class"}
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066\u200b\u2028\ud800]", html)
        html.encode()
    plain = "<script>alert(1)</script>"
    assert Reader(markup(plain)).text == plain
    assert Reader(markup("\x1b[31m\x00\u202e")).text == "␛[31m␀U+202E"


def test_whitespace_of_tokens_is_visible() -> None:
    assert Reader(token_markup(" a\tb\n")).text == "·a⇥b⏎\n"


def test_a_long_text_is_cut() -> None:
    read = Reader(markup("<" * 500_000))
    assert read.text.endswith("… 100,000 more characters") and read.text.count("<") == 400_000


ROW = {
    "token_ids": [5, 6, 7, 8],
    "mask": [True, True, False, True],
    "rollout_logps": [-1.0, -0.5, 0.0, -2.0],
    "logps": [-1.1, -0.5, 0.0, -1.0],
    "ratios": [0.9, 1.0, 1.0, math.e],
    "clipped": [-1, 0, 0, 1],
    "entropies": [0.0, 0.5, 1.0, 2.0],
    "advantages": [-1.5, 0.0, None, math.nan],
    "weight_versions": [3, 3, 4, 4],
    "ref_logps": None,
}


@pytest.mark.parametrize(
    ("colour", "wanted"),
    [
        ("advantage", ["d-12", "d0", "x m", "x"]),
        ("clipped", ["d-16", "d0", "d0 m", "d16"]),
        ("logp_diff", ["d-2", "d0", "d0 m", "d16"]),
        ("ratio", ["d-2", "d0", "d0 m", "d16"]),
        ("entropy", ["d0", "d4", "d8 m", "d16"]),
        ("version", ["d0", "d0", "d16 m", "d16"]),
    ],
)
def test_colours_are_those_of_the_numbers(colour: str, wanted: list[str]) -> None:
    values = values_of(ROW, colour)
    assert values is not None
    assert classes(values, scale_of(colour, values), ROW["mask"]) == wanted
    assert COLOURINGS[colour].title in legend_html(scale_of(colour, values))


def test_each_level_has_its_colour_and_text_that_can_be_read() -> None:
    rules = dict(re.findall(r"^(\S+ ?\S* ?\.d-?\d+) \{ background: (#\w+)", token_css(), re.M))
    assert rules[".tokens .d16"] == colours.diverging(1.0)
    assert rules[".body--dark .tokens .d-8"] == colours.diverging(-0.5, dark=True)
    assert rules[".tokens .d0"] == colours.PAGE_LIGHT  # what most tokens are does not stand out
    for background, text in re.findall(r"background: (#\w+); color: (#\w+)", token_css()):
        assert colours.contrast(background, text) >= 4.5
