"""Rich's console, for text that a model, a run or a server may have written, and how times are written there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.segment import Segment

from swift_r1.runtime.visible import visible

_NO_TERMINAL = 200  # columns of a pipe or a file, where Rich would wrap at 80


class Terminal(Console):
    """Shows text as it is. Rich itself takes brackets for markup and lets escape sequences through to the terminal, which
    would obey them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)
        if not (self.is_terminal or "width" in options or "COLUMNS" in os.environ):
            self.width = _NO_TERMINAL

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        shown = (one if one.control else Segment(visible(one.text), one.style) for one in buffer)
        return super()._render_buffer(shown)


def duration(seconds: float) -> str:
    """Writes a time in two units: 2 h 5 min."""
    whole = round(seconds)
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    for (size, name), (smaller, rest_name) in pairwise(units):
        if whole >= size:
            text = f"{whole // size} {name}"
            rest = whole % size // smaller
            return f"{text} {rest} {rest_name}" if rest else text
    return f"{whole} s"
