"""The import names of ms-swift that plugin files use, served by this package.

`from swift.rewards import ORM, orms` (v4) or `from swift.plugin import ORM, orms` (v3) in a plugin gives
the classes and registries of `swift_r1`, so what the plugin registers is found here. They are served in our own
processes even where ms-swift is installed: its registries are not ours, and importing it takes many seconds.
A name that we lack fails by name; nothing is imported before a plugin asks for it.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from swift_r1.errors import UsageError

_REWARDS = {name: "swift_r1.rewards" for name in ("ORM", "AsyncORM", "orms")}
_DATASETS = {
    name: "swift_r1.data"
    for name in (
        "AlpacaPreprocessor",
        "AutoPreprocessor",
        "DatasetMeta",
        "MessagesPreprocessor",
        "ResponsePreprocessor",
        "RowPreprocessor",
        "register_dataset",
    )
}
_LOGGER = {"get_logger": "swift_r1.plugins.compat"}

# Module of ms-swift -> name in it -> module of ours that holds the name.
IMPORT_NAMES: Mapping[str, Mapping[str, str]] = {
    "swift": {},
    "swift.rewards": _REWARDS,
    "swift.rewards.orm": _REWARDS,
    "swift.dataset": _DATASETS,
    "swift.utils": _LOGGER,
    # version 3
    "swift.plugin": _REWARDS,
    "swift.plugin.orm": _REWARDS,
    "swift.llm": _DATASETS,
    "swift.llm.dataset": _DATASETS,
}


def get_logger(*_: Any, **__: Any) -> logging.Logger:
    """ms-swift's `get_logger`: the logger of plugins. Its arguments (file, level) have no effect here."""
    return logging.getLogger("swift_r1.plugin")


def install_import_names() -> None:
    """Serves `swift.*` from now on in this process; doing it twice changes nothing.

    Raises:
        UsageError: the real ms-swift is imported in this process already, so its names are taken.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    present = sys.modules.get("swift")
    if present is not None:
        raise UsageError(
            f"another package named swift is imported in this process already ({present.__file__}): "
            "its registries are not those of swift-r1, load plugins in a process of their own"
        )
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds and makes the modules of `IMPORT_NAMES`; both finder and loader of the import system."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "swift" and not fullname.startswith("swift."):
            return None
        if fullname not in IMPORT_NAMES:
            known = ", ".join(name for name in IMPORT_NAMES if name != "swift")
            raise ModuleNotFoundError(
                f"swift-r1 has no module {fullname}: of ms-swift's modules it offers {known}; "
                "leave the import out or copy what you need into the plugin",
                name=fullname,
            )
        is_package = any(name.startswith(f"{fullname}.") for name in IMPORT_NAMES)
        return ModuleSpec(fullname, self, is_package=is_package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name, "Names of ms-swift, served by swift-r1.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs: `_Names` looks its names up when they are asked for."""


class _Names(ModuleType):
    """A module whose names live elsewhere; one that it lacks raises `ImportError` with what to do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        names = IMPORT_NAMES[self.__name__]
        if name in names:
            return getattr(importlib.import_module(names[name]), name)
        submodule = f"{self.__name__}.{name}"
        if submodule in IMPORT_NAMES:
            return importlib.import_module(submodule)
        # ImportError, not AttributeError: `from x import y` replaces the text of the latter by its own.
        raise ImportError(
            f"swift-r1 has no {submodule}: {self.__name__} offers {', '.join(sorted(names)) or 'no names'} here; "
            "leave the import out or copy what you need into the plugin",
            name=self.__name__,
        )

    def __dir__(self) -> list[str]:
        return sorted(IMPORT_NAMES[self.__name__])
