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
class DatasetMeta:
    """One dataset, by ms-swift's names.

    Attributes:
        dataset_name: the name for `--dataset`; without one, the ids and the path are its names.
        ms_dataset_id, hf_dataset_id: its ids on ModelScope and Hugging Face.
        dataset_path: a local file that holds it.
        subsets: the names allowed in `--dataset name:subset`.
        split: the hub splits to train on.
        preprocess_func: a `RowPreprocessor`, or any callable from one row (a dict) to a row with `messages`.
        loader: a callable that gives the raw rows. Of these keywords it gets those it names:
            `split` ("train" or "eval"; a loader that names it has a held-out set of its own), `count` (rows wanted
            at most, None for all: a loader that names it samples by itself), `seed`, `subset` (None if not given).
        tags, help: shown by `swift plugins`.
    """

    dataset_name: str | None = None
    ms_dataset_id: str | None = None
    hf_dataset_id: str | None = None
    dataset_path: str | None = None
    subsets: list[str] = field(default_factory=lambda: ["default"])
    split: list[str] = field(default_factory=lambda: ["train"])
    preprocess_func: RowPreprocessor | Callable[[Row], Row | None] = field(default_factory=AutoPreprocessor)
    loader: Loader | None = None
    tags: list[str] = field(default_factory=list)
    help: str | None = None

    @property
    def name(self) -> str:
        """The name it is shown and logged under."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that `--dataset` accepts for it, the one it is shown under first."""
        candidates = (self.dataset_name, self.ms_dataset_id, self.hf_dataset_id, self.dataset_path)
        return tuple(dict.fromkeys(name for name in candidates if name))


# Shown name -> dataset, in order of registration.
datasets: dict[str, DatasetMeta] = {}
_origins: dict[str, str] = {}  # shown name -> file:line that registered it


def register_dataset(meta: DatasetMeta, *, exist_ok: bool = False) -> None:
    """Makes a dataset known to `--dataset`. The line that registered it may do so again (a plugin loaded twice).

    Raises:
        UsageError: the meta has no name, id or path, or another place registered one of its names before.
    """
    if not meta.names:
        raise UsageError("register_dataset: the DatasetMeta has no dataset_name, ms_dataset_id, hf_dataset_id or path")
    caller = sys._getframe(1)
    origin = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    for name, other in list(datasets.items()):
        shared = set(meta.names).intersection(other.names)
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
    """The dataset of that name, id or path; else the one whose id ends in `/name`, if there is one alone."""
    for meta in datasets.values():
        if name in meta.names:
            return meta
    last = name.rstrip("/").rsplit("/", 1)[-1]
    matches = [meta for meta in datasets.values() if last in {known.rsplit("/", 1)[-1] for known in meta.names}]
    return matches[0] if len(matches) == 1 else None
