"""`--dataset` values: `id[:subset/...|all][#N]` with `hf::` or `ms::` in front. Parsed as text alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from swift_r1.errors import UsageError

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """One `--dataset` value.

    Attributes:
        raw: the value as written.
        name: registered name, hub id or path.
        subsets: the subsets named (`all` included), in order; empty when none was.
        sample: rows wanted; None for all.
        hub: `hf` or `ms` where the value says so.
    """

    raw: str
    name: str
    subsets: tuple[str, ...] = ()
    sample: int | None = None
    hub: Literal["hf", "ms"] | None = None

    @property
    def is_file(self) -> bool:
        """The name is written like a data file's."""
        return self.hub is None and self.name.lower().endswith(FILE_SUFFIXES)

    @property
    def label(self) -> str:
        """A short name: a file's stem, else the name itself."""
        return PurePath(self.name).stem if self.is_file else self.name


def parse_dataset(value: str) -> DatasetSpec:
    """Parses one `--dataset` value.

    >>> parse_dataset("ms::org/set:main/socratic#100")
    DatasetSpec(raw='ms::org/set:main/socratic#100', name='org/set', subsets=('main', 'socratic'), sample=100, hub='ms')

    Raises:
        UsageError: no name, an unknown prefix, or a `#N` that is not a positive whole number.
    """
    text, hub, sample = value.strip(), None, None
    prefix, separator, rest = text.partition("::")
    if separator:
        if prefix.lower() not in ("hf", "ms"):
            raise UsageError(f"--dataset {value}: {prefix}:: is no hub, use hf:: or ms::")
        hub, text = prefix.lower(), rest
    head, separator, count = text.rpartition("#")
    if separator:
        if not (count.isascii() and count.isdigit()) or int(count) == 0:
            raise UsageError(f"--dataset {value}: after # comes the number of rows, not {count!r}")
        text, sample = head, int(count)
    name, _, subsets = text.partition(":")
    parts = tuple(part.strip() for part in subsets.split("/")) if subsets else ()
    if not name.strip() or not all(parts):
        raise UsageError(f"--dataset {value!r}: write id[:subset/...|all][#N]")
    return DatasetSpec(value, name.strip(), parts, sample, hub)  # type: ignore[arg-type]
