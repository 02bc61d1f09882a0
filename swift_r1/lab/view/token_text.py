"""The element that shows coloured tokens (`tokens.js` in the browser)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments


class TokenText(ui.element, component="tokens.js"):
    """Tokens as `tokens_html` has them; `numbers` as `numbers_json`. `on_chosen` gets the place of a token that was
    clicked, or chosen with Enter."""

    def __init__(
        self,
        html: str,
        numbers: str,
        label: str,
        on_chosen: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__()
        self._props["html"], self._props["numbers"], self._props["label"] = html, numbers, label

        def chosen(event: GenericEventArguments) -> Any:
            return on_chosen(int(event.args["place"])) if on_chosen is not None else None

        self.on("chosen", chosen)

    def recolour(self, classes: Sequence[str]) -> None:
        """The tokens' classes, one text each."""
        self.run_method("recolour", ",".join(classes))
