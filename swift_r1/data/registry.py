"""The registry of datasets: filled by `register_dataset(DatasetMeta(...))` in a plugin file, or from JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from swift_r1.data.preprocessors import AutoPreprocessor, MessagesPreprocessor, Preprocess
from swift_r1.errors import UsageError, a_kind, one_line

Loader = Callable[..., Iterable[Mapping[str, Any]]]


@dataclass
class SubsetDataset:
    """One subset of a dataset.

    Attributes:
        name: the name for `--dataset name:subset` (default: `subset`).
        subset: what the loader gets as `subset`, or the hub's name of it.
        split: the hub splits to train on, in place of the dataset's.
        preprocess_func: in place of the dataset's.
        is_weak_subset: left out of `--dataset name:all`.
    """

    name: str | None = None
    subset: str = "default"
    split: list[str] | None = None
    preprocess_func: Preprocess | None = None
    is_weak_subset: bool = False

    def __post_init__(self) -> None:
        self.name = self.name or self.subset


@dataclass
class DatasetMeta:
    """One dataset; names and order of the fields are ms-swift's.

    Attributes:
        ms_dataset_id, hf_dataset_id: its ids on ModelScope and Hugging Face, with `ms_revision` and `hf_revision`.
        dataset_path: a local file or folder that holds it.
        dataset_name: the name for `--dataset`; without one, the ids and the path are its names.
        subsets: what `--dataset name:subset` may name; a text stands for `SubsetDataset(subset=text)`.
        split: the hub splits to train on.
        preprocess_func: a `RowPreprocessor`, or any callable from one row (a dict) to a row with `messages`.
        loader: a callable that gives the raw rows. Of these keywords it gets those it names:
            `split` ("train", and "eval" for its own held-out set, which a loader has that names it; where it raises for
            "eval", or gives its training rows, "test" and then "validation"), `count` (rows wanted at most, None for
            all: a loader that names it samples by itself), `seed`, `subset` (None if not given).
        tags, help: shown by `swift check --registered`.
        huge_dataset: ms-swift's, without effect here.
        load_function: ms-swift v3's loader; it needs ms-swift's own objects, so using such a dataset is an error.
        eval_split: the hub splits that are held out.
        ms_split: the splits on ModelScope to train on, where they have other names than `split`.
        files: file names in the folder SWIFT_R1_DATA that hold it, by `train` and `eval`.
    """

    ms_dataset_id: str | None = None
    hf_dataset_id: str | None = None
    dataset_path: str | None = None
    dataset_name: str | None = None
    ms_revision: str | None = None
    hf_revision: str | None = None
    subsets: list[SubsetDataset | str] = field(default_factory=lambda: ["default"])
    split: list[str] = field(default_factory=lambda: ["train"])
    preprocess_func: Preprocess = field(default_factory=AutoPreprocessor)
    loader: Loader | None = None
    tags: list[str] = field(default_factory=list)
    help: str | None = None
    huge_dataset: bool = False
    load_function: Callable[..., Any] | None = None
    eval_split: list[str] | None = None
    ms_split: list[str] | None = None
    files: Mapping[Literal["train", "eval"], str] = field(default_factory=dict)

    @property
    def all_subsets(self) -> tuple[SubsetDataset, ...]:
        """Returns the subsets as objects, in order; ms-swift's own `SubsetDataset` objects work too."""
        return tuple(
            SubsetDataset(subset=one) if isinstance(one, str) else one for one in self.subsets
        )

    @property
    def name(self) -> str:
        """Returns the name it is shown and logged under."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names that `--dataset` accepts for it, the one it is shown under first."""
        candidates = (self.dataset_name, self.ms_dataset_id, self.hf_dataset_id, self.dataset_path)
        return tuple(dict.fromkeys(name for name in candidates if name))


# Shown name -> dataset, in order of registration. ms-swift calls it DATASET_MAPPING.
datasets: dict[str, DatasetMeta] = {}
DATASET_MAPPING = datasets
# Those of `builtin.py`, by name. What a plugin registers under one of their names comes before them.
builtin_datasets: dict[str, DatasetMeta] = {}
# The built-in sets' ids on hubs. An id is what the hub has: only subsets and splits are taken from the built-in set.
hub_datasets: dict[str, DatasetMeta] = {}
_origins: dict[str, str] = {}  # shown name -> file:line that registered it


def register_dataset(
    meta: DatasetMeta, *, exist_ok: bool = False, origin: str | None = None
) -> None:
    """Makes a dataset known to `--dataset`. The line that registered it may do so again (a plugin loaded twice).

    `origin` is that line (default: the caller's). Raises UsageError where the meta has no name, id or path, or another
    place registered one of its names before.
    """
    if not meta.names:
        raise UsageError(
            "register_dataset: the DatasetMeta has no dataset_name, ms_dataset_id, hf_dataset_id or path"
        )
    if origin is None:
        caller = sys._getframe(1)
        origin = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    for name, other in list(datasets.items()):
        shared = set(meta.names).intersection(other.names)
        if meta.dataset_name and other.dataset_name:  # two views of one file, by names of their own
            shared -= {meta.dataset_path}
        if not shared:
            continue
        if _origins[name] != origin and not exist_ok:
            raise UsageError(
                f"dataset {shared.pop()} is registered twice: at {_origins[name]} and at {origin}; rename one"
            )
        del datasets[name], _origins[name]
    datasets[meta.name] = meta
    _origins[meta.name] = origin


def find_dataset(name: str) -> DatasetMeta | None:
    """Returns the registered dataset of that name, id or path; else the built-in one of that name; else the only
    registered one whose id ends in `/name`.
    """
    for meta in datasets.values():
        if name in meta.names:
            return meta
    if name in builtin_datasets:
        return builtin_datasets[name]
    last = name.rstrip("/").rsplit("/", 1)[-1]
    matches = [
        meta
        for meta in datasets.values()
        if last in {known.rsplit("/", 1)[-1] for known in meta.names}
    ]
    return matches[0] if len(matches) == 1 else None


_TEXTS = (
    "ms_dataset_id",
    "hf_dataset_id",
    "dataset_path",
    "dataset_name",
    "ms_revision",
    "hf_revision",
    "help",
)
_SETTINGS = {"split": list, "columns": dict, "messages": dict}
_OTHERS = {"tags": list, "subsets": list, "huge_dataset": object}
_KEYS: Mapping[str, type] = {**dict.fromkeys(_TEXTS, str), **_SETTINGS, **_OTHERS}
_SUBSET_KEYS: Mapping[str, type] = {
    "name": str,
    "subset": str,
    "is_weak_subset": object,
    **_SETTINGS,
}
_KINDS: Mapping[type, str] = {str: "text", list: "a list", dict: "an object"}


def register_dataset_info(paths: str | Sequence[str]) -> None:
    """Registers the datasets of JSON files in the form of ms-swift's `dataset_info.json` (`--custom_dataset_info`).

    A file is a list of objects. Their keys are fields of `DatasetMeta`, and `columns` (renames) and `messages`
    (settings of `MessagesPreprocessor`), which a subset may have too. A relative `dataset_path` is relative to the
    file. The same file may be given again. Raises UsageError with every fault of every file.
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
        raise UsageError(f"{path}: not JSON that can be read: {one_line(error, 200)}") from error
    if not isinstance(content, list):
        raise UsageError(f"{path}: holds {a_kind(content)}, not a list of datasets")
    for number, entry in enumerate(content, start=1):
        where = f"{path} entry {number}"
        about = _checked(entry, _KEYS, where)
        about["preprocess_func"] = _preprocessor(about, where) or AutoPreprocessor()
        if "dataset_path" in about:
            about["dataset_path"] = str(path.parent / Path(about["dataset_path"]).expanduser())
        if "subsets" in about:
            about["subsets"] = [_subset(one, where) for one in about["subsets"]]
        try:
            register_dataset(DatasetMeta(**about), origin=where)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error


def _subset(entry: Any, where: str) -> SubsetDataset | str:
    if isinstance(entry, str):
        return entry
    about = _checked(entry, _SUBSET_KEYS, f"{where}: a subset")
    return SubsetDataset(preprocess_func=_preprocessor(about, where), **about)


def _preprocessor(about: dict[str, Any], where: str) -> Preprocess | None:
    """Takes its settings out of an entry."""
    columns = about.pop("columns", None)
    messages = about.pop("messages", None)
    if columns and not all(isinstance(new, str) for new in columns.values()):
        raise UsageError(f"{where}: columns maps names to names")
    if messages is not None:
        return MessagesPreprocessor(columns=columns, **messages)
    return AutoPreprocessor(columns=columns) if columns else None


def _checked(entry: Any, known: Mapping[str, type], where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where} is {a_kind(entry)}, not an object")
    unknown = sorted(set(entry) - set(known))
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]}; there are {', '.join(sorted(known))}")
    for name, value in entry.items():
        if not isinstance(value, known[name]) and (value is not None or known[name] is list):
            raise UsageError(f"{where}: {name} is {a_kind(value)}, not {_KINDS[known[name]]}")
    return dict(entry)
