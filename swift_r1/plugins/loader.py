"""Loading external plugin files: what they register, and where they fail."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import ModuleType

from swift_r1.errors import SwiftError, UsageError, for_each
from swift_r1.plugins.compat import import_names_for
from swift_r1.plugins.ms_swift import REGISTRIES, adopting

_logger = logging.getLogger("swift_r1.plugins")


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """One plugin file and the names it registered (or replaced), in order.

    Attributes:
        path: as it was given.
        orms, rm_plugins, datasets, schedulers, envs, samplers, tools, agents, trackers: names in the registries of these
            kinds.
        others: names in registries that nothing here reads (`prms`, `context_managers`).
        module: the loaded module, which may have a `gold(row)` for `swift check`.
    """

    path: str
    orms: tuple[str, ...]
    rm_plugins: tuple[str, ...]
    datasets: tuple[str, ...]
    schedulers: tuple[str, ...]
    envs: tuple[str, ...]
    samplers: tuple[str, ...]
    tools: tuple[str, ...]
    agents: tuple[str, ...]
    trackers: tuple[str, ...]
    others: tuple[str, ...]
    module: ModuleType


_LOADED: dict[Path, LoadedPlugin] = {}


def load_plugins(paths: Sequence[str]) -> list[LoadedPlugin]:
    """Runs each plugin file once in this process, in order.

    The folder of a plugin goes to the end of `sys.path`, so it can import its neighbours but none of
    them can replace a library (a `math.py` beside it, say). Raises UsageError with one line for each
    file that is missing or fails, and the plugin's line.
    """

    def load_once(text: str) -> LoadedPlugin:
        path = Path(text).expanduser()
        if path.resolve() not in _LOADED:
            _LOADED[path.resolve()] = _load(text, path)
        return _LOADED[path.resolve()]

    return for_each(paths, load_once)


def _load(text: str, path: Path) -> LoadedPlugin:
    if path.is_dir():
        raise UsageError(f"--external_plugins {path} is a folder: name the Python file in it")
    if not path.is_file():
        raise UsageError(
            f"--external_plugins {path}: there is no such file (looked in {Path.cwd()})"
        )
    if path.suffix != ".py":
        raise UsageError(f"--external_plugins {path} is not a Python file (.py)")
    path = path.resolve()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    # The name depends on the path alone, so that worker processes find classes pickled by reference.
    name = f"swift_r1_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    before = {kind: dict(entries) for kind, (entries, *_) in REGISTRIES.items()}
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with import_names_for(path), adopting():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(_failure(text, path, error)) from error
    changed = {
        kind: tuple(key for key, value in entries.items() if before[kind].get(key) is not value)
        for kind, (entries, *_) in REGISTRIES.items()
    }
    for kind, names in changed.items():
        for key in names:
            if key in before[kind]:
                _logger.warning(
                    "plugin %s replaces the %s %r that was registered before", text, kind, key
                )
    return LoadedPlugin(
        path=text,
        orms=changed["reward"],
        rm_plugins=changed["reward model"],
        datasets=changed["dataset"],
        schedulers=changed["scheduler"],
        envs=changed["environment"],
        samplers=changed["sampler"],
        tools=changed["tool"],
        agents=changed["agent"],
        trackers=changed["tracker"],
        others=(*changed["process reward"], *changed["context manager"]),
        module=module,
    )


def _failure(text: str, path: Path, error: BaseException) -> str:
    """Returns one line, with the line of the plugin that was running last (none for a missing first line)."""
    line = None
    for frame, number in walk_tb(error.__traceback__):
        line = number if frame.f_code.co_filename == str(path) else line
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line = error.lineno
    place = f"{text}:{line}" if line else text
    parts = [
        "" if isinstance(error, SwiftError) else type(error).__name__,
        " ".join(str(error).split()),
    ]
    return f"plugin {place}: {': '.join(filter(None, parts))}"
