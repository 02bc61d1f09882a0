"""What `--dataset` values name: registered datasets, files, folders, ids on hubs."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

from swift_r1.data import builtin as _builtin  # noqa: F401  its import registers
from swift_r1.data.hubs import Hub, SetLocation, default_hub, is_hub_id
from swift_r1.data.preprocessors import AutoPreprocessor, Preprocess
from swift_r1.data.registry import (
    DatasetMeta,
    SubsetDataset,
    builtin_datasets,
    datasets,
    find_dataset,
    hub_datasets,
)
from swift_r1.data.sources import DatasetSpec, Source, Split, parse_dataset
from swift_r1.errors import UsageError, for_each

DATA_FOLDER = "SWIFT_R1_DATA"


def open_sources(
    values: Sequence[str],
    labels: set[str] | None = None,
    use_hf: bool | None = None,
    streaming: bool = False,
) -> list[Source]:
    """Resolves `--dataset` values; opens nothing yet. `labels` are those in use already; new ones are added.
    Raises UsageError with all faults of all values."""
    taken = set() if labels is None else labels
    sources = for_each(values, lambda value: _open(_spec(value), use_hf))
    return [
        replace(source, label=_unique(source.name, taken), streaming=streaming)
        for source in sources
    ]


def _spec(value: str) -> DatasetSpec:
    """Returns the parsed value; a path that exists is one, whatever characters it has in it."""
    if os.path.exists(value):
        return DatasetSpec(value, value)
    head, _, rows = value.rpartition("#")
    if head and rows.isdigit() and int(rows) and os.path.exists(head):
        return DatasetSpec(value, head, (), int(rows))
    spec = parse_dataset(value)
    home = str(Path(spec.name).expanduser())
    return replace(spec, name=home) if os.path.exists(home) else spec


def _open(spec: DatasetSpec, use_hf: bool | None) -> Source:
    meta = find_dataset(spec.name)
    exact = meta is not None and spec.name in meta.names
    if spec.hub is None and not exact and os.path.exists(spec.name):
        return _local(spec, meta, spec.name)
    if not exact and is_hub_id(spec.name) and not spec.is_file:
        # A copy of a registered set is preprocessed like that set.
        about = meta or hub_datasets.get(spec.name) or DatasetMeta(dataset_name=spec.name)
        return _hub_source(spec, about, SetLocation(spec.name, spec.hub or default_hub(use_hf)))
    if meta is None:
        raise _unknown(spec)
    registered = None if spec.hub is not None else _registered(spec, meta)
    return registered or _hub_source(spec, meta, _place(spec, meta, use_hf))


def _unknown(spec: DatasetSpec) -> UsageError:
    """Returns the error for a value that names nothing, with what is near to it."""
    if spec.is_file:
        path = Path(spec.name)
        there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        return UsageError(f"--dataset {spec.raw}: file not found: {spec.name}{hint}")
    known = list(dict.fromkeys([*datasets, *builtin_datasets]))
    near = difflib.get_close_matches(spec.name, known, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return UsageError(
        f"unknown dataset {spec.raw}: no such file, and not registered{hint} Registered: {', '.join(known)}"
    )


def _registered(spec: DatasetSpec, meta: DatasetMeta) -> Source | None:
    """Returns a registered set that needs no hub; None for one that a hub has. Raises UsageError where its path does
    not exist, or ms-swift alone can load it."""
    if meta.loader is not None:
        subsets = _subsets(spec, meta)
        return Source(
            spec,
            meta.name,
            meta.preprocess_func,
            loader=meta.loader,
            subsets=tuple(one.subset for one in subsets),
            of_subset=_own(subsets),
        )
    if meta.dataset_path is not None:
        if not os.path.exists(meta.dataset_path):
            raise UsageError(
                f"--dataset {spec.raw}: file not found: {meta.dataset_path} (its dataset_path)"
            )
        return _local(spec, meta, meta.dataset_path)
    folder = os.environ.get(DATA_FOLDER)
    paths = {split: Path(folder, name) for split, name in meta.files.items()} if folder else {}
    files: dict[Split, str] = {split: str(path) for split, path in paths.items() if path.is_file()}
    if "train" in files:
        return Source(spec, meta.name, meta.preprocess_func, files=files)
    if meta.load_function is not None:
        raise UsageError(
            f"--dataset {spec.raw}: {meta.name} has a load_function of ms-swift v3, which needs ms-swift's own "
            "objects: give its DatasetMeta a loader= that yields rows, or dataset_path="
        )
    return None


def _local(spec: DatasetSpec, meta: DatasetMeta | None, path: str) -> Source:
    """Returns a file or folder; a registered set of that path or name preprocesses it."""
    if Path(path).is_dir():
        about = meta or DatasetMeta(dataset_name=Path(path).resolve().name)
        return _hub_source(spec, about, SetLocation(path))
    if spec.subsets:
        raise UsageError(f"--dataset {spec.raw}: a file has no subsets")
    if meta is not None:
        return Source(spec, meta.name, meta.preprocess_func, files={"train": path})
    # A line of text is a prompt.
    preprocess = AutoPreprocessor(
        columns={"text": "query"} if path.lower().endswith(".txt") else None
    )
    return Source(spec, Path(path).stem, preprocess, files={"train": path})


def _hub_source(spec: DatasetSpec, meta: DatasetMeta, place: SetLocation) -> Source:
    subsets = _subsets(spec, meta, on_hub=True)
    splits = meta.ms_split if place.hub == "ms" and meta.ms_split else meta.split
    return Source(
        spec,
        meta.name,
        meta.preprocess_func,
        of_subset=_own(subsets),
        place=place,
        parts=tuple((one.subset, tuple(one.split or splits)) for one in subsets),
        held_out_split=tuple(meta.eval_split or ()),
    )


def _place(spec: DatasetSpec, meta: DatasetMeta, use_hf: bool | None) -> SetLocation:
    """Returns the hub that the value names; else the default one, or the only one that has the set."""
    places: dict[Hub, tuple[str | None, str | None]] = {
        "hf": (meta.hf_dataset_id, meta.hf_revision),
        "ms": (meta.ms_dataset_id, meta.ms_revision),
    }
    wanted = spec.hub or default_hub(use_hf)
    other: Hub = "ms" if wanted == "hf" else "hf"
    for hub in (wanted,) if spec.hub else (wanted, other):
        name, revision = places[hub]
        if name:
            return SetLocation(name, hub, revision)
    if spec.hub and is_hub_id(spec.name):
        return SetLocation(spec.name, spec.hub)
    raise UsageError(
        f"--dataset {spec.raw}: {meta.name} has no {'' if not spec.hub else wanted + '_'}dataset_id"
    )


def _own(subsets: Sequence[SubsetDataset]) -> dict[str, Preprocess]:
    """Returns the preprocessors of the subsets that have their own."""
    return {one.subset: one.preprocess_func for one in subsets if one.preprocess_func is not None}


def _subsets(
    spec: DatasetSpec, meta: DatasetMeta, on_hub: bool = False
) -> tuple[SubsetDataset, ...]:
    """Returns the subsets that the value names. A hub may have subsets that are not registered.

    Without names, of a loader the only one that is registered by more than its name, else none; on a hub the only one,
    else `default`.
    """
    known = {str(one.name): one for one in meta.all_subsets}
    if not spec.subsets:
        if len(known) == 1 and (on_hub or not isinstance(meta.subsets[0], str)):
            return tuple(known.values())
        if not on_hub:
            return ()
        if "default" in known:
            return (known["default"],)
        raise UsageError(
            f"--dataset {spec.raw}: name a subset, {meta.name}:SUBSET; there are {', '.join(known)}, all"
        )
    if "all" not in known and (spec.subsets == ("all",) if on_hub else "all" in spec.subsets):
        return tuple(one for one in known.values() if not one.is_weak_subset)
    unknown = [name for name in spec.subsets if name not in known]
    if unknown and not on_hub:
        raise UsageError(
            f"--dataset {spec.raw}: no subset {unknown[0]}; {meta.name} has {', '.join(known)}"
        )
    return tuple(known.get(name) or SubsetDataset(subset=name) for name in spec.subsets)


def _unique(name: str, taken: set[str]) -> str:
    labels = chain([name], (f"{name}-{number}" for number in count(2)))
    label = next(label for label in labels if label not in taken)
    taken.add(label)
    return label
