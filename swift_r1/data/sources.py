"""Where rows come from: a loader, a file, a folder or a hub."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from swift_r1.data.files import RawRow, Span, check_file, line_spans, read_file, read_span
from swift_r1.data.fingerprint import file_digest, fingerprint
from swift_r1.data.hubs import Place, split_identity, split_rows
from swift_r1.data.registry import Loader
from swift_r1.data.syntax import DatasetSpec
from swift_r1.errors import UsageError

Split = Literal["train", "eval"]
_LINES = (".jsonl", ".txt")


@dataclass(frozen=True, slots=True)
class LoaderPart:
    """Rows `start` to `start + count` of a loader."""

    split: Split
    start: int
    count: int
    seed: int


Task = Span | LoaderPart | list[RawRow]
"""Some rows of a source: where to read them, or themselves."""


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
        place: the hub or folder, where it is one; `parts` are its subsets with their splits.
        held_out_split: splits of `place` that are held out.
        streaming: rows of a hub are downloaded as they are read.
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
    place: Place | None = None
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    held_out_split: tuple[str, ...] = ()
    streaming: bool = False

    def preprocess_of(self, row: RawRow) -> Callable[..., Any]:
        """The preprocessor of a row: its subset's own, else the dataset's."""
        return self.preprocess if row.subset is None else self.of_subset.get(row.subset, self.preprocess)

    @property
    def has_held_out(self) -> bool:
        """It has a held-out split of its own."""
        if self.loader is not None:
            return "split" in _keywords(self.loader)
        return self.held_out_path is not None or bool(self.held_out_split)

    @property
    def samples_itself(self) -> bool:
        """The loader makes as many rows as it is asked for."""
        return self.loader is not None and len(self.subsets) < 2 and "count" in _keywords(self.loader)

    def rows(self, split: Split, count: int | None, seed: int) -> Iterator[RawRow]:
        """The raw rows of a split; `count` and `seed` matter only to a loader that samples itself.

        Raises:
            UsageError: the file or hub cannot be read, or the loader raises.
        """
        if self.loader is not None:
            yield from self._loaded({"split": split, "count": count, "seed": seed}, 0)
        elif self.place is not None:
            yield from self._placed(split)
        else:
            yield from read_file(self._file(split))

    def tasks(self, split: Split, count: int | None, seed: int, size: int) -> Iterator[Task]:
        """The same in parts of about `size` rows, which `task_rows` reads: in other processes where they can be read
        apart from each other.

        Raises:
            UsageError: as `rows`.
        """
        if self.loader is not None and self.samples_itself and count and "start" in _keywords(self.loader):
            for start in range(0, count, size):
                yield LoaderPart(split, start, min(size, count - start), seed)
            return
        if self.loader is None and self.place is None and self._file(split).lower().endswith(_LINES):
            path = self._file(split)
            check_file(Path(path))
            yield from line_spans(path, size)
            return
        rows = self.rows(split, count, seed)
        while part := list(islice(rows, size)):
            yield part

    def task_rows(self, task: Task) -> Iterator[RawRow]:
        """The raw rows of a part."""
        if isinstance(task, Span):
            return read_span(task)
        if isinstance(task, LoaderPart):
            known = {"split": task.split, "count": task.count, "seed": task.seed, "start": task.start}
            return self._loaded(known, task.start)
        return iter(task)

    def count(self, split: Split, count: int | None) -> int | None:
        """How many raw rows there are, where that is known without reading them."""
        return count if self.samples_itself else None

    def identity(self, split: Split, count: int | None, seed: int) -> str | None:
        """A hash of the raw rows; None for a loader that may give others each time (one that never does has an
        attribute `cacheable` that is true).

        Raises:
            UsageError: the file or hub cannot be read.
        """
        if self.loader is not None:
            if not getattr(self.loader, "cacheable", False):
                return None
            code = fingerprint(self.loader)
            return code and f"{code} {split} {count} {seed} {self.subsets}"
        if self.place is not None:
            parts = self._parts(split)
            return " ".join(split_identity(self.place, subset, one) for subset, splits in parts for one in splits)
        path = self._file(split)
        check_file(Path(path))
        try:
            return f"{file_digest(path)} {path}"
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _file(self, split: Split) -> str:
        path = self.held_out_path if split == "eval" and self.held_out_path is not None else self.path
        assert path is not None
        return path

    def _parts(self, split: Split) -> tuple[tuple[str, tuple[str, ...]], ...]:
        if split == "eval" and self.held_out_split:
            return tuple((subset, self.held_out_split) for subset, _splits in self.parts)
        return self.parts

    def _placed(self, split: Split) -> Iterator[RawRow]:
        assert self.place is not None
        index = 0
        for subset, splits in self._parts(split):
            for one in splits:
                for number, row in enumerate(split_rows(self.place, subset, one, streaming=self.streaming)):
                    yield RawRow(index, f"{self.place.name}:{subset} {one} row {number}", dict(row), subset=subset)
                    index += 1

    def _loaded(self, known: dict[str, Any], first: int) -> Iterator[RawRow]:
        assert self.loader is not None
        wanted = _keywords(self.loader)
        index = first
        for subset in self.subsets or (None,):
            given = {key: value for key, value in (known | {"subset": subset}).items() if key in wanted}
            try:
                for row in self.loader(**given):
                    yield RawRow(index, f"{self.name} row {index}", dict(row), subset=subset)
                    index += 1
            except UsageError:
                raise
            except Exception as error:
                raise UsageError(f"the loader of dataset {self.name} failed: {describe(error)}") from error


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    """Of the keywords a loader may name, those it names (all but `start`, where it takes `**kwargs`)."""
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
