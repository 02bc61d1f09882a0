"""Rich's console, for text that a model, a run or a server may have written."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment

from swift_r1.runtime.visible import visible


class Terminal(Console):
    """Rich itself lets escape sequences in a text through to the terminal, which would obey them."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        shown = (one if one.control else Segment(visible(one.text), one.style) for one in buffer)
        return super()._render_buffer(shown)
