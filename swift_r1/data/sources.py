"""`--dataset` values, `id[:subset/...|all][#N]` with `hf::` or `ms::` in front, and where their rows come from: a
loader, a file, a folder or a hub."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from swift_r1.data.files import (
    FILE_SUFFIXES,
    IN_PARTS,
    WHOLE,
    ProcessShare,
    RawRow,
    check_file,
    read_file,
)
from swift_r1.data.fingerprint import file_digest, fingerprint
from swift_r1.data.hubs import Hub, SetLocation, load_split, split_rows
from swift_r1.data.image_files import ImageRules
from swift_r1.data.preprocessors import Preprocess
from swift_r1.data.registry import Loader
from swift_r1.data.tools import ToolUse
from swift_r1.errors import UsageError, describe

Split = Literal["train", "eval"]
HELD_OUT = ("eval", "test", "validation")
"""What a loader may call its held-out split, in the order in which they are tried."""
_COMPARED = 64  # first held-out rows, by which a loader that knows no such split is found
_COMPARED_WITH = 100_000  # training rows, where the loader does not make as many as it is asked for
_logger = logging.getLogger("swift_r1.data")


@dataclass(frozen=True)
class DataFlags:
    """The flags that name the rows and say how they are prepared. `seed` is `--data_seed`, else `--seed`."""

    dataset: Sequence[str]
    val_dataset: Sequence[str] = ()
    split_dataset_ratio: float = 0.0
    interleave_prob: Sequence[float] | None = None
    stopping_strategy: str = "first_exhausted"
    use_hf: bool | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    agent_template: str | None = None
    tools: Sequence[str] = ()
    calls_tools: bool = False
    dataset_num_proc: int = 1
    load_from_cache_file: bool = True
    streaming: bool = False
    shuffle_buffer_size: int = 1000
    dataset_shuffle: bool = True
    seed: int = 42
    evaluates: bool = False
    eval_limit: int | None = None
    eval_datasets: Sequence[str] = ()
    whole: bool = False  # rows are conversations with their answers, which are learned
    pairs: bool = False  # and each has an answer that is rejected
    task: str = ""  # what prompt ids begin with, of a run with several tasks
    max_pixels: int | None = None
    min_pixels: int | None = None
    load_images_from_urls: bool = False

    @property
    def image_rules(self) -> ImageRules:
        return ImageRules(self.max_pixels, self.min_pixels, self.load_images_from_urls)

    @property
    def tool_use(self) -> ToolUse:
        return ToolUse(self.agent_template, tuple(self.tools), self.calls_tools)


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """One `--dataset` value.

    Attributes:
        raw: the value as written.
        name: registered name, hub id or path.
        subsets: the subsets named (`all` included), in order; empty when none was.
        sample: rows wanted; None for all.
        hub: the hub, where the value says so.
    """

    raw: str
    name: str
    subsets: tuple[str, ...] = ()
    sample: int | None = None
    hub: Hub | None = None

    @property
    def is_file(self) -> bool:
        """Returns whether the name is written like a data file's."""
        return self.hub is None and self.name.lower().endswith(FILE_SUFFIXES)


_HUBS: Mapping[str, Hub] = {"hf": "hf", "ms": "ms"}


def parse_dataset(value: str) -> DatasetSpec:
    """Parses one `--dataset` value; looks at nothing but the text.

    >>> parse_dataset("ms::org/set:main/socratic#100")
    DatasetSpec(raw='ms::org/set:main/socratic#100', name='org/set', subsets=('main', 'socratic'), sample=100, hub='ms')

    Raises:
        UsageError: no name, an unknown prefix, or a `#N` that is not a positive whole number.
    """
    text = value.strip()
    hub = None
    sample = None
    prefix, separator, rest = text.partition("::")
    if separator:
        if prefix.lower() not in _HUBS:
            raise UsageError(f"--dataset {value}: {prefix}:: is not a hub, use hf:: or ms::")
        hub = _HUBS[prefix.lower()]
        text = rest
    head, separator, count = text.rpartition("#")
    if separator:
        if not (count.isascii() and count.isdigit()) or int(count) == 0:
            raise UsageError(f"--dataset {value}: after # comes the number of rows, not {count!r}")
        text = head
        sample = int(count)
    name, _, subsets = text.partition(":")
    parts = tuple(part.strip() for part in subsets.split("/")) if subsets else ()
    if not name.strip() or not all(parts):
        raise UsageError(f"--dataset {value!r}: write id[:subset/...|all][#N]")
    return DatasetSpec(value, name.strip(), parts, sample, hub)


@dataclass(frozen=True, slots=True)
class Source:
    """One `--dataset` value, resolved.

    Attributes:
        name: what rewards get as `dataset`: the registered name, or the file's stem.
        label: like `name`, but unique among the sources of a run; prompt ids start with it.
        files: the files to read, by split.
        loader: the loader to call, where there is one.
        subsets: the subsets to load, one after the other; empty for the loader's default.
        of_subset: preprocessors of the subsets that have their own, by what the loader gets as `subset`.
        place: the hub or folder, where it is one; `parts` are its subsets with their splits.
        held_out_split: splits of `place` that are held out.
        streaming: rows of a hub are downloaded as they are read.
        whole: rows keep the answers at the end of their messages, which are learned.
        pairs: each of those has `rejected_messages` too.
    """

    spec: DatasetSpec
    name: str
    preprocess: Preprocess
    label: str = ""
    files: Mapping[Split, str] = field(default_factory=dict)
    loader: Loader | None = None
    subsets: tuple[str, ...] = ()
    of_subset: Mapping[str, Preprocess] = field(default_factory=dict)
    place: SetLocation | None = None
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    held_out_split: tuple[str, ...] = ()
    streaming: bool = False
    whole: bool = False
    pairs: bool = False

    @property
    def _keywords(self) -> frozenset[str]:
        """Returns the keywords that the loader names of those it may name (all except `start`, where it takes
        `**kwargs`)."""
        assert self.loader is not None
        parameters = inspect.signature(self.loader).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return frozenset(("split", "count", "seed", "subset"))
        return frozenset(parameter.name for parameter in parameters)

    @property
    def has_held_out(self) -> bool:
        if self.loader is not None:
            return "split" in self._keywords
        return "eval" in self.files or bool(self.held_out_split)

    @property
    def samples_itself(self) -> bool:
        """Returns whether the loader makes as many rows as it is asked for."""
        return self.loader is not None and len(self.subsets) < 2 and "count" in self._keywords

    @property
    def folders(self) -> tuple[Path, ...]:
        """Returns the folders that hold the data, where relative paths in rows begin."""
        named = {Path(path).parent: None for path in self.files.values()}
        if self.place is not None and self.place.hub is None:
            named[Path(self.place.name)] = None
        return tuple(named)

    def in_parts(self, count: int | None) -> bool:
        """Returns whether several processes can read a share of the rows each."""
        if self.loader is not None:
            return self.samples_itself and bool(count) and "start" in self._keywords
        return self.place is not None or all(
            path.lower().endswith(IN_PARTS) for path in self.files.values()
        )

    def rows(
        self, split: Split, count: int | None, seed: int, share: ProcessShare = WHOLE
    ) -> Iterator[RawRow]:
        """Yields the raw rows of a split, or a share of them; `count` and `seed` matter only to a loader that samples
        itself. Raises UsageError where the file or hub cannot be read, or the loader raises."""
        if self.loader is not None:
            given = {"split": self._name_of(split, seed), "count": None, "seed": seed}
            if self.samples_itself and count is not None:
                own = share.places(count)
                given |= {"count": len(own), "start": own.start}
            yield from self._loaded(given)
        elif self.place is not None:
            yield from self._placed(split, share)
        else:
            yield from read_file(self._file(split), share)

    def _placed(self, split: Split, share: ProcessShare) -> Iterator[RawRow]:
        """Yields rows of a hub or folder; of streamed ones there is one share alone."""
        assert self.place is not None
        parts = [
            (*part, load_split(self.place, *part, streaming=self.streaming))
            for part in self._parts(split)
        ]
        total = 0 if self.streaming else sum(len(table) for _, _, table in parts)
        index = 0
        for subset, part, table in parts:
            start = 0
            size = 0
            if not self.streaming:
                size = len(table)
                own = share.of_batch(total, index, size)
                start = own.start
                table = table.select(own)
            read = split_rows(self.place, subset, part, table)
            for number, (row, fault) in enumerate(read, start):
                where = f"{self.place.name}:{subset} {part} row {number}"
                yield RawRow(index + number, where, row, fault, subset)
                size = max(size, number + 1)
            index += size

    def identity(self, split: Split, count: int | None, seed: int) -> str | None:
        """Returns a hash of the raw rows; None for a loader that may give different rows each time (one that never does
        has an attribute `cacheable` that is true). Raises as `rows`."""
        if self.loader is not None:
            if not getattr(self.loader, "cacheable", False):
                return None
            code = fingerprint(self.loader)
            return code and f"{code} {split} {count} {seed} {self.subsets}"
        if self.place is not None:
            tables = (
                load_split(self.place, subset, part, streaming=False)
                for subset, part in self._parts(split)
            )
            return " ".join(table._fingerprint for table in tables)
        path = self._file(split)
        check_file(Path(path))
        try:
            return f"{file_digest(path)} {path}"
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _file(self, split: Split) -> str:
        return self.files.get(split, self.files["train"])

    def _parts(self, split: Split) -> Iterator[tuple[str, str]]:
        for subset, splits in self.parts:
            for part in self.held_out_split if split == "eval" and self.held_out_split else splits:
                yield subset, part

    def _name_of(self, split: Split, seed: int) -> str:
        """Returns what the loader calls a split. Its held-out one is the first of `HELD_OUT` whose first rows are not
        among those of `train`: loaders that do not know a name raise, or give their training rows. Raises UsageError
        where it knows none."""
        if split == "train" or "split" not in self._keywords:
            return split

        def first(name: str, most: int) -> set[str]:
            rows = self._loaded({"split": name, "count": _COMPARED, "seed": seed})
            return {repr(raw.row) for raw in islice(rows, most)}

        trained = first("train", _COMPARED_WITH)
        same = []
        faults = []
        for name in HELD_OUT:
            try:
                if first(name, _COMPARED) - trained:
                    return name
                same.append(name)
            except UsageError as error:
                faults.append(error)
        given = (
            f"(it gets split='train', and for its held-out rows {' or '.join(map(repr, HELD_OUT))})"
        )
        if not same:
            raise UsageError(f"{faults[0]} {given}")
        _logger.warning(
            "dataset %s: its loader gives training rows as held-out ones %s", self.name, given
        )
        return same[0]

    def _loaded(self, given: dict[str, Any]) -> Iterator[RawRow]:
        assert self.loader is not None
        wanted = self._keywords
        index = given.get("start", 0)
        for subset in self.subsets or (None,):
            known = given | {"subset": subset}
            try:
                for row in self.loader(
                    **{name: value for name, value in known.items() if name in wanted}
                ):
                    yield RawRow(index, f"{self.name} row {index}", dict(row), subset=subset)
                    index += 1
            except UsageError:
                raise
            except Exception as error:
                raise UsageError(
                    f"the loader of dataset {self.name} failed: {describe(error)}"
                ) from error
