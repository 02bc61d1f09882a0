"""The registry of datasets: what `register_dataset(DatasetMeta(...))` in a plugin file fills."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swift_r1.data.preprocessors import AutoPreprocessor, RowPreprocessor
from swift_r1.errors import UsageError

Row = dict[str, Any]
Loader = Callable[..., Iterable[Mapping[str, Any]]]


@dataclass
class SubsetDataset:
    """One subset of a dataset, with its own preprocessor where it needs one.

    Attributes:
        name: the name for `--dataset name:subset` (default: `subset`).
        subset: what the loader gets as `subset`.
        split: kept for ms-swift; a local file or loader has no hub splits.
        preprocess_func: instead of the dataset's.
        is_weak_subset: left out of `--dataset name:all`.
    """

    name: str | None = None
    subset: str = "default"
    split: list[str] | None = None
    preprocess_func: RowPreprocessor | Callable[[Row], Row | None] | None = None
    is_weak_subset: bool = False

    def __post_init__(self) -> None:
        self.name = self.name or self.subset


@dataclass
class DatasetMeta:
    """One dataset, by ms-swift's names and in its order.

    Attributes:
        ms_dataset_id, hf_dataset_id: its ids on ModelScope and Hugging Face.
        dataset_path: a local file that holds it.
        dataset_name: the name for `--dataset`; without one, the ids and the path are its names.
        ms_revision, hf_revision, huge_dataset: kept for ms-swift; nothing is downloaded here.
        subsets: what `--dataset name:subset` may name; a text stands for `SubsetDataset(subset=text)`.
        split: the hub splits to train on.
        preprocess_func: a `RowPreprocessor`, or any callable from one row (a dict) to a row with `messages`.
        loader: a callable that gives the raw rows. Of these keywords it gets those it names:
            `split` ("train" or "eval"; a loader that names it has a held-out set of its own), `count` (rows wanted
            at most, None for all: a loader that names it samples by itself), `seed`, `subset` (None if not given).
        tags, help: shown by `swift plugins`.
        load_function: ms-swift v3's loader; it needs ms-swift's own objects, so using such a dataset is an error.
        eval_split: the hub splits that are held out, where it has such.
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
    preprocess_func: RowPreprocessor | Callable[[Row], Row | None] = field(default_factory=AutoPreprocessor)
    loader: Loader | None = None
    tags: list[str] = field(default_factory=list)
    help: str | None = None
    huge_dataset: bool = False
    load_function: Callable[..., Any] | None = None
    eval_split: list[str] | None = None
    ms_split: list[str] | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_subsets(self) -> tuple[SubsetDataset, ...]:
        """The subsets as objects, in order; ms-swift's own `SubsetDataset` objects are as good as ours."""
        return tuple(SubsetDataset(subset=one) if isinstance(one, str) else one for one in self.subsets)  # type: ignore[misc]

    @property
    def name(self) -> str:
        """The name it is shown and logged under."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that `--dataset` accepts for it, the one it is shown under first."""
        candidates = (self.dataset_name, self.ms_dataset_id, self.hf_dataset_id, self.dataset_path)
        return tuple(dict.fromkeys(name for name in candidates if name))


# Shown name -> dataset, in order of registration. ms-swift calls it DATASET_MAPPING.
datasets: dict[str, DatasetMeta] = {}
DATASET_MAPPING = datasets
# Those of `builtin.py`, by name. What a plugin registers under one of their names comes before them.
builtin_datasets: dict[str, DatasetMeta] = {}
# The ids of these on hubs. An id is what the hub has: of the built-in set it takes its subsets and splits alone.
hub_datasets: dict[str, DatasetMeta] = {}
_origins: dict[str, str] = {}  # shown name -> file:line that registered it


def register_dataset(meta: DatasetMeta, *, exist_ok: bool = False, origin: str | None = None) -> None:
    """Makes a dataset known to `--dataset`. The line that registered it may do so again (a plugin loaded twice).

    `origin` is that line, where it is not the caller's.

    Raises:
        UsageError: the meta has no name, id or path, or another place registered one of its names before.
    """
    if not meta.names:
        raise UsageError("register_dataset: the DatasetMeta has no dataset_name, ms_dataset_id, hf_dataset_id or path")
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
    """The registered dataset of that name, id or path; else the built-in one of that name; else the registered one
    whose id ends in `/name`, if there is one alone.
    """
    last = name.rstrip("/").rsplit("/", 1)[-1]
    for meta in datasets.values():
        if name in meta.names:
            return meta
    if name in builtin_datasets:
        return builtin_datasets[name]
    matches = [meta for meta in datasets.values() if last in {known.rsplit("/", 1)[-1] for known in meta.names}]
    return matches[0] if len(matches) == 1 else None
