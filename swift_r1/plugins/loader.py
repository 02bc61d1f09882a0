"""Loading external plugin files: what they register, and where they fail."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from swift_r1.errors import SwiftError, UsageError
from swift_r1.plugins.compat import import_names_for
from swift_r1.plugins.ms_swift import Registries

_logger = logging.getLogger("swift_r1.plugins")


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """One plugin file and the names it registered (or replaced), in order.

    Attributes:
        path: as it was given.
        orms, datasets, schedulers, envs: names in the registries of these kinds.
        others: names in registries that nothing here reads (`prms`, `rm_plugins`, `context_managers`).
        module: the loaded module, which may have a `gold(row)` for `swift check`.
    """

    path: str
    orms: tuple[str, ...]
    datasets: tuple[str, ...]
    schedulers: tuple[str, ...]
    envs: tuple[str, ...]
    others: tuple[str, ...]
    module: ModuleType


_LOADED: dict[Path, LoadedPlugin] = {}


def load_plugins(paths: Sequence[str]) -> list[LoadedPlugin]:
    """Runs each plugin file once in this process, in order.

    The folder of a plugin goes to the end of `sys.path`, so it can import its neighbours but none of
    them can stand in for a library (a `math.py` beside it, say).

    Raises:
        UsageError: one line for each file that is missing or fails, with the plugin's file and line.
    """
    loaded: list[LoadedPlugin] = []
    faults: list[str] = []
    for text in paths:
        path = Path(text).expanduser()
        resolved = path.resolve()
        if resolved in _LOADED:
            loaded.append(_LOADED[resolved])
            continue
        fault = _path_fault(path)
        if fault:
            faults.append(fault)
            continue
        try:
            loaded.append(_load(text, resolved))
        except _PluginFailed as failure:
            faults.append(str(failure))
    if faults:
        raise UsageError(*faults)
    return loaded


class _PluginFailed(Exception):
    """A plugin raised while it was loaded; the message has file and line."""


def _path_fault(path: Path) -> str | None:
    if path.is_dir():
        return f"--external_plugins {path} is a folder: name the Python file in it"
    if not path.is_file():
        return f"--external_plugins {path}: there is no such file (looked in {Path.cwd()})"
    if path.suffix != ".py":
        return f"--external_plugins {path} is not a Python file (.py)"
    return None


def _load(text: str, path: Path) -> LoadedPlugin:
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    # The name depends on the path alone, so that worker processes find classes pickled by reference.
    name = f"swift_r1_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    before, theirs = _registered(), Registries()
    module = _module(name, path)
    sys.modules[name] = module
    try:
        with import_names_for(path):
            module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
            theirs.adopt()
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _PluginFailed(_failure(text, path, error)) from error
    after = _registered()
    changed = {
        kind: tuple(key for key, value in entries.items() if before[kind].get(key) is not value)
        for kind, entries in after.items()
    }
    for kind, names in changed.items():
        for key in names:
            if key in before[kind]:
                _logger.warning("plugin %s replaces the %s %r that was registered before", text, kind, key)
    _LOADED[path] = LoadedPlugin(
        path=text,
        orms=changed["reward"],
        datasets=changed["dataset"],
        schedulers=changed["scheduler"],
        envs=changed["environment"],
        others=(*changed["process reward"], *changed["reward model"], *changed["context manager"]),
        module=module,
    )
    return _LOADED[path]


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the suffix is .py
    return importlib.util.module_from_spec(spec)


def _registered() -> dict[str, dict[str, Any]]:
    from swift_r1.data.registry import datasets
    from swift_r1.plugins.reward_models import prms, rm_plugins
    from swift_r1.plugins.rollouts import context_managers, envs, multi_turns
    from swift_r1.rewards import orms

    return {
        "reward": dict(orms),
        "dataset": dict(datasets),
        "scheduler": dict(multi_turns),
        "environment": dict(envs),
        "process reward": dict(prms),
        "reward model": dict(rm_plugins),
        "context manager": dict(context_managers),
    }


def _failure(text: str, path: Path, error: BaseException) -> str:
    line = _line_in(path, error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line = error.lineno
    place = f"{text}:{line}" if line else text
    message = " ".join(str(error).split())
    if isinstance(error, SwiftError):
        return f"plugin {place}: {message}"
    return f"plugin {place}: {type(error).__name__}{f': {message}' if message else ''}"


def _line_in(path: Path, traceback: TracebackType | None) -> int | None:
    """The line of the plugin that was running last, None where the error came before its first line."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
