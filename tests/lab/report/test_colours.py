"""Colours: their ends, what is out of range, and text that can be read on all of them."""

from __future__ import annotations

import pytest

from swift_r1.lab.report import colours


def test_a_diverging_scale_has_the_page_in_its_middle() -> None:
    assert (
        colours.diverging(0) == colours.PAGE_LIGHT
        and colours.diverging(0, dark=True) == colours.PAGE_DARK
    )
    assert colours.diverging(-9) == colours.diverging(-1) == "#0072b2"
    assert colours.diverging(1) == colours.diverging(float("inf")) == "#e69f00"


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_what_is_not_known_is_grey(missing: float | None) -> None:
    assert colours.diverging(missing) == colours.UNKNOWN


def test_text_can_be_read_on_every_colour() -> None:
    backgrounds = [colours.UNKNOWN, colours.PAGE_LIGHT, colours.PAGE_DARK]
    backgrounds += [
        colours.diverging(place / 49 - 1, dark) for dark in (False, True) for place in range(99)
    ]
    assert min(colours.contrast(colours.text_on(colour), colour) for colour in backgrounds) >= 4.5
    assert colours.contrast("#000000", "#ffffff") == pytest.approx(21)


def test_a_series_stands_out_from_its_page() -> None:
    for dark, page in ((False, colours.PAGE_LIGHT), (True, colours.PAGE_DARK)):
        assert len({colours.series(number, dark) for number in range(6)}) == 6
        assert min(colours.contrast(colours.series(number, dark), page) for number in range(6)) > 2
    assert colours.series(6) == colours.series(0)
