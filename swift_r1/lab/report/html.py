"""A report as one HTML file: nothing in it is fetched, and nothing in it runs."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from swift_r1.lab.report.blocks import Report, printable
from swift_r1.lab.report.figures import DARK, LIGHT


def html(report: Report) -> str:
    """Returns the page. All texts are escaped by the template; only the figures' SVG, which is our own, goes in as it
    is."""
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.filters["svg"] = lambda figure: Markup(figure.svg)
    return environment.from_string(page).render(
        report=report, light=Markup(LIGHT), dark=Markup(DARK)
    )
