"""The colours of every chart and token, told apart by the colour-blind too: Okabe and Ito's for series, blue to orange
through the page's own colour for values of tokens. Colours are `#rrggbb`."""

from __future__ import annotations

import math

# Okabe and Ito 2008 (jfly.uni-koeln.de/color), without yellow, which vanishes on white, and black, which is the text's.
# The two blues change places with the background, so that the first series stands out on both.
SERIES_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
SERIES_DARK = ("#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#0072b2")
# of a class of completions, wherever it is shown
CLASSES = {
    **{"right": 2, "wrong value": 1, "wrong format": 3, "no answer": 4, "truncated": 5},
    "invalid reward": 0,
}
PAGE_LIGHT = "#ffffff"
PAGE_DARK = "#1a1c1e"
# text on the page
INK_LIGHT = "#1b1b1b"
INK_DARK = "#e6e6e6"
UNKNOWN = "#9a9a9a"  # of a value that is missing or not a number
_BLUE = "#0072b2"
_ORANGE = "#e69f00"


def series(number: int, dark: bool = False) -> str:
    """Returns the colour of series `number`, from 0; they come again after six."""
    colours = SERIES_DARK if dark else SERIES_LIGHT
    return colours[number % len(colours)]


def diverging(value: float | None, dark: bool = False) -> str:
    """Returns the colour of a signed value: blue at -1 and below, the page's colour at 0, orange at 1 and above."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return _mixed(
        PAGE_DARK if dark else PAGE_LIGHT, _BLUE if value < 0 else _ORANGE, min(1.0, abs(value))
    )


def text_on(background: str) -> str:
    """Returns black or white, whichever has the greater contrast: at least 4.58, of the 4.5 that WCAG 2.2 asks for."""
    return max("#000000", "#ffffff", key=lambda colour: contrast(colour, background))


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio of two colours, from 1 to 21."""
    low, high = sorted(_luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def _mixed(one: str, other: str, share: float) -> str:
    return "#" + "".join(
        f"{round(a + (b - a) * share):02x}" for a, b in zip(_rgb(one), _rgb(other), strict=True)
    )


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    channels = [value / 255 for value in _rgb(colour)]
    red, green, blue = (
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
