"""A preprocessor as a hash: its class, its settings, and the source of all the user's code it can reach.

Prepared rows are kept under it, so a changed plugin never gets rows that it did not make. Installed packages are taken
as unchanging; of this package, the modules that handle data count. The `Hasher` of `datasets` knows a function of an
imported file by its name alone, whatever has become of the file.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = tuple(
    Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "purelib", "platlib")
)
_NOT_THE_USERS = (*_INSTALLED, _PACKAGE)
# Also those of an environment that this one stands on, by a .pth file or PYTHONPATH.
_LIBRARIES = {"site-packages", "dist-packages"}


class _Unknown(Exception):
    """Something whose content cannot be determined."""


def fingerprint(value: Any) -> str | None:
    """Returns a hash of a preprocessor or loader (or several, in lists and dicts); None where its content cannot be
    determined."""
    sources: dict[str, str] = {}
    try:
        described = _described(value, sources, set())
    except _Unknown:
        return None
    text = json.dumps(
        [described, sorted(sources.items()), _own_code(), sys.version_info[:2]], sort_keys=True
    )
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def file_digest(path: str | Path) -> str:
    """Returns a hash of a file's content; OSError where it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


@functools.cache
def _own_code() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted((_PACKAGE / "data").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _described(value: Any, sources: dict[str, str], seen: set[int]) -> Any:
    """Returns a value as JSON; adds the sources of the code that it uses to `sources`."""
    if value is None or isinstance(value, bool | int | float | str | bytes | PurePath):
        return [type(value).__name__, repr(value)]
    if id(value) in seen:
        return "again"
    seen.add(id(value))

    def inner(one: Any) -> Any:
        return _described(one, sources, seen)

    if isinstance(value, Mapping):
        return ["mapping", [[inner(key), inner(item)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return ["list", [inner(item) for item in value]]
    if isinstance(value, set | frozenset):
        return ["set", sorted(json.dumps(inner(item)) for item in value)]
    if isinstance(value, re.Pattern):
        return ["pattern", repr(value.pattern), value.flags]
    if isinstance(value, functools.partial):
        return ["partial", inner(value.func), inner(value.args), inner(value.keywords)]
    if isinstance(value, MethodType):
        return ["method", inner(value.__func__), inner(value.__self__)]
    if isinstance(value, BuiltinFunctionType | ModuleType):
        return ["named", getattr(value, "__module__", None), value.__name__]
    if isinstance(value, FunctionType):
        _add_module(value.__module__, sources)
        # set already
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        about = [inner(value.__defaults__), inner(value.__kwdefaults__), inner(cells)]
        return ["function", value.__module__, value.__qualname__, about]
    if inspect.isclass(value):
        for base in value.__mro__:
            _add_module(base.__module__, sources)
        return ["class", value.__module__, value.__qualname__]
    if hasattr(value, "__dict__") and type(value).__module__ not in ("numpy.random.mtrand",):
        return ["object", inner(type(value)), inner(vars(value))]
    raise _Unknown(type(value).__name__)


def _add_module(name: str, sources: dict[str, str]) -> None:
    """The user's module of that name, and the user's modules that it imports anywhere in it."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file:
        _add_file(Path(file), getattr(module, "__package__", None) or "", sources)


def _add_file(path: Path, package: str, sources: dict[str, str]) -> None:
    path = path.resolve()
    if str(path) in sources or path.suffix != ".py" or not _LIBRARIES.isdisjoint(path.parts):
        return
    if any(path.is_relative_to(folder) for folder in _NOT_THE_USERS):
        return
    try:
        content = path.read_bytes()
        tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError) as error:
        raise _Unknown(str(path)) from error
    sources[str(path)] = hashlib.blake2b(content, digest_size=16).hexdigest()
    for name in _imported(tree, package):
        loaded = sys.modules.get(name)
        if loaded is not None:
            _add_module(name, sources)
        elif (spec := _found(name, path.parent)) is not None and spec.origin:
            inside = name if spec.submodule_search_locations else name.rpartition(".")[0]
            _add_file(Path(spec.origin), inside, sources)


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Yields names of modules that a source may import, and of all their parents."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            base = ".".join([*above, node.module] if node.module else above)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)) if parts[0])


def _found(name: str, folder: Path) -> ModuleSpec | None:
    """Returns the file of a module that is not loaded; imports nothing."""
    places = [*sys.path, str(folder)]
    spec = None
    parts = name.split(".")
    for end in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: end + 1]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return spec
