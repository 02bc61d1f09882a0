"""What a run is, where it stands, and its curves."""

from __future__ import annotations

from nicegui import ui

from swift_r1.view.shell import Page, view_page


@view_page("/", "Overview", go="o")
def overview(page: Page) -> None:
    ui.label(page.run.name)
