"""Where rows come from: a registered dataset's loader or file, or a local file named on the command line."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from swift_r1.data import builtin as _builtin  # noqa: F401  its import registers
from swift_r1.data.files import RawRow, read_file
from swift_r1.data.preprocessors import AutoPreprocessor
from swift_r1.data.registry import DatasetMeta, Loader, SubsetDataset, builtin_datasets, datasets, find_dataset
from swift_r1.data.syntax import DatasetSpec, parse_dataset
from swift_r1.errors import UsageError

Split = Literal["train", "eval"]
DATA_FOLDER = "SWIFT_R1_DATA"


@dataclass(frozen=True, slots=True)
class Source:
    """One `--dataset` value, resolved.

    Attributes:
        spec: the parsed value.
        name: what rewards get as `dataset`: the registered name, or the file's stem.
        label: like `name`, but no two sources of a run share one; prompt ids start with it.
        preprocess: the preprocessor.
        path: the file to read, where there is one.
        held_out_path: the file of its held-out rows, where there is one.
        loader: the loader to call, where there is one.
        subsets: the subsets to load, one after the other; empty for "as the loader likes".
        of_subset: preprocessors of the subsets that have their own, by what the loader gets as `subset`.
    """

    spec: DatasetSpec
    name: str
    label: str
    preprocess: Callable[..., Any]
    path: str | None = None
    held_out_path: str | None = None
    loader: Loader | None = None
    subsets: tuple[str, ...] = ()
    of_subset: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def preprocess_of(self, row: RawRow) -> Callable[..., Any]:
        """The preprocessor of a row: its subset's own, else the dataset's."""
        return self.preprocess if row.subset is None else self.of_subset.get(row.subset, self.preprocess)

    @property
    def has_held_out(self) -> bool:
        """It has a held-out split of its own."""
        if self.loader is None:
            return self.held_out_path is not None
        return "split" in _keywords(self.loader)

    @property
    def samples_itself(self) -> bool:
        """The loader makes as many rows as it is asked for."""
        return self.loader is not None and len(self.subsets) < 2 and "count" in _keywords(self.loader)

    def rows(self, split: Split, count: int | None, seed: int) -> Iterator[RawRow]:
        """The raw rows of a split; `count` and `seed` matter only to a loader that samples itself.

        Raises:
            UsageError: the file cannot be read, or the loader raises.
        """
        if self.path is not None:
            held_out = split == "eval" and self.held_out_path is not None
            yield from read_file(self.held_out_path if held_out else self.path)  # type: ignore[arg-type]
            return
        assert self.loader is not None
        wanted = _keywords(self.loader)
        index = 0
        for subset in self.subsets or (None,):
            known = {"split": split, "count": count, "seed": seed, "subset": subset}
            try:
                for row in self.loader(**{key: value for key, value in known.items() if key in wanted}):
                    yield RawRow(index, f"{self.name} row {index}", dict(row), subset=subset)
                    index += 1
            except UsageError:
                raise
            except Exception as error:
                raise UsageError(f"the loader of dataset {self.name} failed: {describe(error)}") from error


def open_sources(values: Sequence[str], labels: set[str] | None = None) -> list[Source]:
    """Resolves `--dataset` values; opens nothing yet. `labels` are those taken already, and are added to.

    Raises:
        UsageError: all faults of all values, one a line.
    """
    taken = set() if labels is None else labels
    sources, faults = [], []
    for value in values:
        try:
            sources.append(_open(parse_dataset(value), taken))
        except UsageError as error:
            faults.extend(error.faults)
    if faults:
        raise UsageError(*faults)
    return sources


def _open(spec: DatasetSpec, taken: set[str]) -> Source:
    meta = find_dataset(spec.name)
    if meta is None:
        if not spec.is_file and not Path(spec.name).is_file():
            raise UsageError(_unknown(spec))
        if not Path(spec.name).is_file():
            raise UsageError(f"--dataset {spec.raw}: file not found: {spec.name}{_similar_files(spec.name)}")
        if spec.subsets:
            raise UsageError(f"--dataset {spec.raw}: a file has no subsets")
        return Source(spec, spec.label, _unique(spec.label, taken), AutoPreprocessor(), path=spec.name)
    subsets = _subsets(spec, meta)
    label = _unique(meta.name, taken)
    if meta.loader is not None:
        return Source(
            spec,
            meta.name,
            label,
            meta.preprocess_func,
            loader=meta.loader,
            subsets=tuple(one.subset for one in subsets),
            of_subset={one.subset: one.preprocess_func for one in subsets if one.preprocess_func is not None},
        )
    if meta.dataset_path is not None:
        if spec.subsets:
            raise UsageError(f"--dataset {spec.raw}: a file has no subsets")
        return Source(spec, meta.name, label, meta.preprocess_func, path=meta.dataset_path)
    if "train" in (files := _data_files(meta)):
        return Source(
            spec, meta.name, label, meta.preprocess_func, path=files["train"], held_out_path=files.get("eval")
        )
    if meta.load_function is not None:
        raise UsageError(
            f"--dataset {spec.raw}: {meta.name} has a load_function of ms-swift v3, which needs ms-swift's own "
            "objects: give its DatasetMeta a loader= that yields rows, or dataset_path="
        )
    raise UsageError(
        f"--dataset {spec.raw}: {meta.name} is on a hub, and this version cannot download it: "
        "register it with dataset_path= (a local file) or loader="
    )


def _data_files(meta: DatasetMeta) -> dict[str, str]:
    """Those files of the dataset that the folder SWIFT_R1_DATA has, by split."""
    folder = os.environ.get(DATA_FOLDER)
    if not folder:
        return {}
    paths = {split: Path(folder, name) for split, name in meta.files.items()}
    return {split: str(path) for split, path in paths.items() if path.is_file()}


def _subsets(spec: DatasetSpec, meta: DatasetMeta) -> tuple[SubsetDataset, ...]:
    """The subsets that the value names; without names, the only one that is registered with a meaning of its own."""
    known = {str(one.name): one for one in meta.all_subsets}
    if not spec.subsets:
        alone = len(known) == 1 and not isinstance(meta.subsets[0], str)
        return tuple(known.values()) if alone else ()
    if "all" in spec.subsets:
        return tuple(one for one in known.values() if not one.is_weak_subset)
    unknown = [name for name in spec.subsets if name not in known]
    if unknown:
        raise UsageError(f"--dataset {spec.raw}: no subset {unknown[0]}; {meta.name} has {', '.join(known)}")
    return tuple(known[name] for name in spec.subsets)


def _unique(name: str, taken: set[str]) -> str:
    label, number = name, 1
    while label in taken:
        number += 1
        label = f"{name}-{number}"
    taken.add(label)
    return label


def _unknown(spec: DatasetSpec) -> str:
    known = [*datasets, *(name for name in builtin_datasets if name not in datasets)]
    near = difflib.get_close_matches(spec.name, known, n=3)
    message = f"unknown dataset {spec.raw}: no such file, and not registered"
    if near:
        message += f"; did you mean {' or '.join(near)}?"
    return f"{message} Registered: {', '.join(known)}"


def _similar_files(name: str) -> str:
    path = Path(name)
    there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, there, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    """Of the keywords a loader may name, those it names (all, where it takes `**kwargs`)."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return frozenset(("split", "count", "seed", "subset"))
    return frozenset(parameter.name for parameter in parameters)


def describe(error: BaseException) -> str:
    """An exception in one line: type, message, and the line of code that raised it."""
    message = " ".join(str(error).split())[:300]
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return text if frame is None else f"{text} ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})"
