"""The import finder: `swift.*`, imported by plugin code, gives what this package has under ms-swift's names.

`from swift.rewards import ORM, orms` (v4) or `from swift.plugin import ORM, orms` (v3) in a plugin gives the classes
and registries of `swift_r1`, so what the plugin registers is found here. `import_names` is the table of names.

A name whose meaning we do not have is a stand-in, which says at its use what is missing. One plugin file often imports
ten names and uses two, so importing, subclassing and annotating must work; only making an object, calling, or reading
an attribute fails.

Only plugin code is served: a plugin file or a file in its folder, while it loads and while it runs (an import inside
`__call__`, a worker process). The same import in other code finds what is installed, or nothing. Where ms-swift
itself is installed its own modules come first; those that its version lacks are served from here, with its classes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from swift_r1.errors import UsageError
from swift_r1.plugins.import_names import IMPORT_NAMES, Missing
from swift_r1.plugins.ms_swift import is_installed, its_own

_DO_WITHOUT = "leave the import out, or copy what you need into the plugin"
_IMPORT_SYSTEM = (__file__, str(importlib.__file__), "<frozen importlib")
_folders: set[Path] = set()  # of plugin files


@contextmanager
def import_names_for(plugin: Path) -> Iterator[None]:
    """Serves `swift.*` to the plugin's code from now on; the block is for loading it. UsageError where another package
    named swift is imported in this process already, so its names are taken."""
    present = sys.modules.get("swift")
    if present is not None and not isinstance(present, _Names) and not is_installed():
        raise UsageError(
            f"another package named swift is imported in this process already ({present.__file__}): "
            "it hides ms-swift's names; load plugins in a process of their own"
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(len(sys.meta_path) if is_installed() else 0, _Finder())
    _folders.add(plugin.parent)
    try:
        yield
    finally:
        # Out of the way of other code; the plugin's next import is served again, with the same modules.
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Names)]:
            del sys.modules[name]


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of `IMPORT_NAMES`; both finder and loader of the import system."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "swift" or not _plugin_code_imports():
            return None
        if fullname not in IMPORT_NAMES:
            known = ", ".join(name for name in IMPORT_NAMES if name != "swift")
            raise ModuleNotFoundError(
                f"swift-r1 has no module {fullname} of ms-swift: {_DO_WITHOUT}; it has {known}",
                name=fullname,
            )
        return _spec(fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs: `_Names` looks its names up when they are asked for."""


class _Names(ModuleType):
    """A module whose names live elsewhere; one that it lacks raises `ImportError` with what to do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        here = IMPORT_NAMES[self.__name__]
        own = f"{self.__name__}.{name}"
        entry = here.get(name)
        if entry is not None and is_installed() and (real := its_own(name)) is not None:
            return real
        if isinstance(entry, Missing):
            return stand_in(own, entry.instead)
        if entry is not None:
            return getattr(importlib.import_module(entry), name)
        if own in IMPORT_NAMES:
            return _names(own)
        # ImportError, not AttributeError: `from x import y` replaces the text of the latter by its own.
        raise ImportError(
            f"swift-r1 has no {own} of ms-swift: {_DO_WITHOUT}; "
            f"{self.__name__} has {', '.join(sorted(here)) or 'no names'} here",
            name=self.__name__,
        )

    def __dir__(self) -> list[str]:
        return sorted(IMPORT_NAMES[self.__name__])


@cache
def _names(fullname: str) -> _Names:
    """Returns one module object per name, however often it is imported."""
    module = _Names(fullname, "Names of ms-swift, served by swift-r1.")
    module.__spec__ = _spec(fullname)
    return module


def _spec(fullname: str) -> ModuleSpec:
    is_package = any(name.startswith(f"{fullname}.") for name in IMPORT_NAMES)
    return ModuleSpec(fullname, _Finder(), is_package=is_package)


def _plugin_code_imports() -> bool:
    """Returns whether a plugin imports: the innermost frame that is not the import system's or this module's tells."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_IMPORT_SYSTEM):
        frame = frame.f_back
    path = Path("" if frame is None else frame.f_code.co_filename)
    return any(
        path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts
        for folder in _folders
    )


class NotHere(NotImplementedError):
    """A name was used that only means something in ms-swift."""


def _missing(cls: type, *_: Any, **__: Any) -> NoReturn:
    name = type.__getattribute__(cls, "_swift_name")
    instead = type.__getattribute__(cls, "_instead")
    own = "" if cls.__name__ == name.rpartition(".")[2] else f" (used through {cls.__name__})"
    raise NotHere(f"{name}{own} only means something in ms-swift: {instead}")


class _Meta(type):
    """The class of stand-ins, which can be subclassed and used in annotations; nothing else."""

    __call__ = __iter__ = __getitem__ = __setitem__ = _missing

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself asks for: annotations, pickling, signatures
            raise AttributeError(f"{cls.__name__} has no {name}")
        _missing(cls)


def instead_of(cls: Any) -> str | None:
    """Returns what to do in the place of a class that derives from a stand-in; None for any other."""
    return type.__getattribute__(cls, "_instead") if isinstance(cls, _Meta) else None


@cache
def stand_in(name: str, instead: str) -> type:
    """Returns a class named after `name` (`swift.template.Template`) that fails at its use; `instead` says what to do
    here."""
    module, _, short = name.rpartition(".")
    return _Meta(short, (), {"__module__": module, "_swift_name": name, "_instead": instead})
