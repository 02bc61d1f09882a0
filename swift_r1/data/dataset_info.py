"""`--custom_dataset_info`: JSON files that register datasets, in the form of ms-swift's `dataset_info.json`.

A file is a list of objects. Their keys are fields of `DatasetMeta`, and `columns` (renames) and `messages` (settings of
`MessagesPreprocessor`), which a subset may have too. A relative `dataset_path` is relative to the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_r1.data.preprocessors import AutoPreprocessor, MessagesPreprocessor
from swift_r1.data.registry import DatasetMeta, SubsetDataset, register_dataset
from swift_r1.errors import UsageError

_TEXTS = (
    *("ms_dataset_id", "hf_dataset_id", "dataset_path", "dataset_name", "ms_revision", "hf_revision"),
    "help",
)
_LISTS = ("split", "tags")
_KEYS = frozenset((*_TEXTS, *_LISTS, "subsets", "columns", "messages", "huge_dataset"))
_SUBSET_TEXTS = ("name", "subset")
_SUBSET_KEYS = frozenset((*_SUBSET_TEXTS, "split", "columns", "messages", "is_weak_subset"))


def register_dataset_info(paths: str | Sequence[str]) -> None:
    """Registers what a file or several say; the same file may be given again.

    Raises:
        UsageError: every fault of every file, one a line.
    """
    faults: list[str] = []
    for path in [paths] if isinstance(paths, str) else paths:
        try:
            _register_file(Path(path).expanduser())
        except UsageError as error:
            faults += [f"--custom_dataset_info {fault}" for fault in error.faults]
    if faults:
        raise UsageError(*faults)


def _register_file(path: Path) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{path}: not JSON that can be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, list):
        raise UsageError(f"{path}: holds a {type(content).__name__}, not a list of datasets")
    for number, entry in enumerate(content, start=1):
        where = f"{path} entry {number}"
        about = _checked(entry, _KEYS, _TEXTS, where)
        about["preprocess_func"] = _preprocessor(about, where) or AutoPreprocessor()
        if "dataset_path" in about:
            about["dataset_path"] = str(path.parent / Path(about["dataset_path"]).expanduser())
        if "subsets" in about:
            about["subsets"] = [_subset(one, where) for one in _list(about["subsets"], f"{where}: subsets")]
        try:
            register_dataset(DatasetMeta(**about), origin=where)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error


def _subset(entry: Any, where: str) -> SubsetDataset | str:
    if isinstance(entry, str):
        return entry
    about = _checked(entry, _SUBSET_KEYS, _SUBSET_TEXTS, f"{where}: a subset")
    return SubsetDataset(preprocess_func=_preprocessor(about, where), **about)


def _preprocessor(about: dict[str, Any], where: str) -> AutoPreprocessor | MessagesPreprocessor | None:
    """Takes its settings out of an entry."""
    columns, messages = about.pop("columns", None), about.pop("messages", None)
    for name, value in (("columns", columns), ("messages", messages)):
        if value is not None and not isinstance(value, dict):
            raise UsageError(f"{where}: {name} is a {type(value).__name__}, not an object")
    if columns and not all(isinstance(new, str) for new in columns.values()):
        raise UsageError(f"{where}: columns maps names to names")
    if messages is not None:
        return MessagesPreprocessor(columns=columns, **messages)
    return AutoPreprocessor(columns=columns) if columns else None


def _checked(entry: Any, known: frozenset[str], texts: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where} is a {type(entry).__name__}, not an object")
    unknown = sorted(set(entry) - known)
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]}; there are {', '.join(sorted(known))}")
    for name in texts:
        if not isinstance(entry.get(name), str | None):
            raise UsageError(f"{where}: {name} is a {type(entry[name]).__name__}, not text")
    for name in _LISTS:
        if name in entry:
            _list(entry[name], f"{where}: {name}")
    return dict(entry)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{what} is a {type(value).__name__}, not a list")
    return value
