"""Rich's console, for text that a model, a run or a server may have written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from swift_r1.runtime.visible import visible

_NO_TERMINAL = 200  # columns of a pipe or a file, where Rich would wrap at 80


class Terminal(Console):
    """Rich itself lets escape sequences in a text through to the terminal, which would obey them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not (self.is_terminal or "width" in options or "COLUMNS" in os.environ):
            self.width = _NO_TERMINAL

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        shown = (one if one.control else Segment(visible(one.text), one.style) for one in buffer)
        return super()._render_buffer(shown)
