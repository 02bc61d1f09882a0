"""The pages, one module each; importing one registers it (`shell.view_page`)."""

from __future__ import annotations

import importlib
import pkgutil


def load() -> None:
    """Imports every page."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
