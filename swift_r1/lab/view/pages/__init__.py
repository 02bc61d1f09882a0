"""The pages, one module each; importing one registers it (`shell.view_page`)."""

from __future__ import annotations

import importlib
import pkgutil

# in the navigation
_ORDER = ("overview", "completions", "prompt", "tokens", "time")


def load() -> None:
    """Imports every page."""
    found = {module.name for module in pkgutil.iter_modules(__path__)}
    for name in dict.fromkeys((*(name for name in _ORDER if name in found), *sorted(found))):
        importlib.import_module(f"{__name__}.{name}")
