"""`--dataset` and its relatives -> training rows and held-out rows. Nothing here tokenises."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from swift_r1.data.images import images_of
from swift_r1.data.prepare import prepared_rows, request_key, require_rows
from swift_r1.data.preprocessors import Row
from swift_r1.data.resolve import open_sources
from swift_r1.data.rows import Drops, preprocessed
from swift_r1.data.sources import DataFlags, Source, Split
from swift_r1.data.store import Rows
from swift_r1.data.streaming import RowStream
from swift_r1.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

_logger = logging.getLogger("swift_r1.data")
_LOOKED_AT = 100  # rows of a dataset that show its columns


@dataclass(frozen=True, slots=True)
class LoadedData:
    """The rows of a run. A row is a dict: `messages`, the dataset's columns, `dataset`, `prompt_id`.

    Attributes:
        train: in the order of the data (the sampler shuffles).
        eval: held out; empty where the run does not evaluate.
        drops: rows left out because they could not be read or preprocessed.
        prepared: where the rows are, for the run's other processes (`prepare`).
    """

    train: Sequence[Row]
    eval: Sequence[Row]
    drops: Drops = field(default_factory=Drops)
    prepared: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def answered(self) -> bool:
        """Returns whether every row has an answer, which `swift sft` learns; of streamed rows that is not known."""
        return 0 < self.drops.seen - self.drops.broken - self.drops.filtered <= self.drops.answered

    def and_those(self, other: LoadedData) -> LoadedData:
        """Returns the rows of two tasks."""
        drops = Drops()
        drops.merge(self.drops)
        drops.merge(other.drops)
        return LoadedData(
            _joined(self.train, other.train),
            _joined(self.eval, other.eval),
            drops,
            {**self.prepared, **other.prepared},
        )


def _joined(one: Sequence[Row], other: Sequence[Row]) -> Sequence[Row]:
    if isinstance(one, Rows) and isinstance(other, Rows):
        return Rows.joined([one, other])
    return [*one, *other]


class _Collector:
    """Takes the rows of sources, dataset after dataset. `#N` chooses as ms-swift does: with its default seed, the same
    rows."""

    def __init__(self, flags: DataFlags, made: Mapping[str, str] | None, keep: bool) -> None:
        self._flags = flags
        self._made = made or {}
        self._keep = keep
        self._state: np.random.RandomState | None = None
        self._skipped = 0
        self.drops = Drops()
        self.prepared: dict[str, str] = {}

    def collect(
        self, source: Source, split: Split, wanted: int | None, *, repeat: bool = True
    ) -> Rows:
        """Returns `wanted` good rows of a source (all, if None), reported and never empty; fewer only without
        `repeat`."""
        if split == "eval" and source.has_held_out:
            source = replace(source, label=f"{source.label}/eval")
        count = wanted if source.samples_itself else None
        made = prepared_rows(source, split, count, self._flags, self._made, self._keep)
        self.prepared[request_key(source, split, count, self._flags)] = made.name
        self.drops.merge(made.drops)
        there = len(made.rows)
        if wanted is None or (there < wanted and not repeat):
            wanted = there
        if there < wanted and not self._made:
            _logger.info("dataset %s has %d rows, repeated to make %d", source.name, there, wanted)
        places = self._places(there, wanted)
        return made.rows if wanted == there else made.rows.chosen(places)

    def _places(self, count: int, wanted: int) -> np.ndarray:
        """Returns `wanted` places among `count` rows: all of them as often as they go into it, and a choice for the
        rest."""
        import numpy as np

        # ms-swift draws a number for something else before it comes to a dataset's rows
        self._skipped += 1
        turns, rest = divmod(wanted, count)
        last = np.arange(rest)
        if self._flags.dataset_shuffle and rest:
            if self._state is None:
                self._state = np.random.RandomState(self._flags.seed % 2**32)
            for _ in range(self._skipped):
                self._state.randint(0, 2**31 - 1)
            self._skipped = 0
            last = self._state.permutation(count)[:rest]
        return np.concatenate([np.tile(np.arange(count), turns), last])


def load_rows(
    flags: DataFlags, prepared: Mapping[str, str] | None = None, *, keep: bool = False
) -> LoadedData:
    """Returns all rows that the data flags name, and those held out where the run evaluates.

    The held-out rows are those of `--val_dataset`; else the share `--split_dataset_ratio` of each dataset; else,
    where the run evaluates, each dataset's own held-out split or rows taken out of its training rows,
    `--eval_limit` in all. The same flags give the same rows in every process.

    Args:
        prepared: of the launcher's `LoadedData`, so that nothing is preprocessed twice.
        keep: this is the launcher.

    Raises:
        UsageError: unknown dataset, unreadable file, a `--columns` name that no dataset has, a column with a reserved
            name, no row left.
    """
    seed = flags.seed
    collector = _Collector(flags, prepared, keep)
    validation = _Collector(flags, prepared, keep)
    limit = sys.maxsize if flags.eval_limit is None else flags.eval_limit
    if flags.streaming:
        out = _held_out_of_stream(flags, validation, limit) if flags.evaluates else []
        return LoadedData(first_rows(flags), out, validation.drops, validation.prepared)
    if flags.val_dataset and flags.split_dataset_ratio:
        raise UsageError(
            "--val_dataset and --split_dataset_ratio both name held-out rows: give one"
        )
    labels: set[str] = set()
    sources = _sources(flags.dataset, flags, labels)
    if not prepared:
        _check_column_names(sources, flags)
    training = [collector.collect(source, "train", source.spec.sample) for source in sources]
    outs: list[Rows] = []
    if flags.val_dataset and flags.evaluates:
        for source in _sources(flags.val_dataset, flags, labels):
            wanted = source.spec.sample or (limit if source.samples_itself else None)
            outs.append(validation.collect(source, "eval", wanted))
    elif flags.split_dataset_ratio:
        for number, rows in enumerate(training):
            share = max(1, int(flags.split_dataset_ratio * len(rows)))
            training[number], out = _take_out(rows, min(share, len(rows) - 1), seed)
            outs.append(out)
    elif flags.evaluates and not flags.eval_datasets:
        for number, (source, quota) in enumerate(
            zip(sources, _shares(limit, len(sources)), strict=True)
        ):
            if quota and source.has_held_out:
                outs.append(validation.collect(source, "eval", quota, repeat=False))
            elif quota:
                training[number], out = _take_out(training[number], quota, seed)
                outs.append(out)
    held_out = Rows.joined(outs)
    train = Rows.joined(training) if flags.interleave_prob is None else _mixed(training, flags)
    if not train:
        raise UsageError("no training row is left; see the causes above")
    if held_out:
        import numpy as np

        keys = np.unique(held_out.column("key"))
        shared = int(np.isin(keys, train.column("key")).sum())
        if shared:
            _logger.warning(
                "%d of %d held-out prompts are in the training rows too", shared, len(keys)
            )
    if len(held_out) > limit:
        _logger.info("evaluating on %d of %d held-out rows (--eval_limit)", limit, len(held_out))
        held_out = held_out.chosen(_choice(len(held_out), limit, f"{seed}:eval"))
    if not keep:
        _logger.info("data: %d training rows, %d held out", len(train), len(held_out))
    collector.drops.merge(validation.drops)
    return LoadedData(train, held_out, collector.drops, collector.prepared | validation.prepared)


def _held_out_of_stream(flags: DataFlags, validation: _Collector, limit: int) -> Rows:
    outs = []
    sources = _sources(flags.val_dataset or flags.dataset, flags)
    for source, quota in zip(sources, _shares(limit, len(sources)), strict=True):
        if not flags.val_dataset and not source.has_held_out:
            raise UsageError(
                f"--streaming true takes no held-out rows out of the training rows: give --val_dataset "
                f"({source.name} has no held-out split)"
            )
        wanted = source.spec.sample if flags.val_dataset else None
        outs.append(validation.collect(source, "eval", wanted or quota, repeat=False))
    return Rows.joined(outs)


def first_rows(flags: DataFlags, count: int = 4) -> list[Row]:
    """Returns the first good training rows of every dataset, for checks before any model loads. Reads no more than
    needed, and raises as `load_rows`."""
    sources = _sources(flags.dataset, flags, streaming=True)
    _check_column_names(sources, flags)
    found: list[Row] = []
    for source in sources:
        drops = Drops()
        raws = source.rows("train", count, flags.seed)
        rows = list(islice(preprocessed(source, raws, flags, drops), count))
        require_rows(source, len(rows), drops)
        found += rows
    return found


def stream_of(flags: DataFlags, fits: Callable[[Row], bool]) -> RowStream:
    """Returns the training rows of `--streaming true`."""
    return RowStream(_sources(flags.dataset, flags, streaming=True), flags, fits)


def load_dataset(
    datasets: str | Sequence[str],
    *,
    split_dataset_ratio: float = 0.0,
    seed: int = 42,
    num_proc: int = 1,
    load_from_cache_file: bool = True,
    shuffle: bool = False,
    use_hf: bool | None = None,
    strict: bool = False,
    columns: Mapping[str, str] | None = None,
) -> tuple[Sequence[Row], Sequence[Row]]:
    """ms-swift's call for scripts and plugins: the rows of `--dataset` values as (training, held out).

    Without `shuffle`, `#N` takes the first rows. Rows stay in the order of the data. Raises as `load_rows`.
    """
    flags = DataFlags(
        dataset=[datasets] if isinstance(datasets, str) else datasets,
        split_dataset_ratio=split_dataset_ratio,
        use_hf=use_hf,
        columns=columns or {},
        strict=strict,
        dataset_num_proc=num_proc,
        load_from_cache_file=load_from_cache_file,
        dataset_shuffle=shuffle,
        seed=seed,
    )
    data = load_rows(flags)
    return data.train, data.eval


def columns_of(*parts: Sequence[Row]) -> frozenset[str]:
    """Returns the columns that every row has, so that a reward can rely on them; `messages` and our own are among
    them."""
    sets = [names for rows in parts for names in _sets_of_columns(rows)]
    return frozenset.intersection(*sets) if sets else frozenset()


def _sets_of_columns(rows: Sequence[Row]) -> Collection[frozenset[str]]:
    """Returns the different sets of columns that rows have."""
    return rows.sets_of_columns() if isinstance(rows, Rows) else set(map(frozenset, rows))


def most_images(*parts: Sequence[Row]) -> int:
    """Returns how many images the row with the most of them has."""
    counts = [
        rows.most_images()
        if isinstance(rows, Rows)
        else max((len(images_of(row)) for row in rows), default=0)
        for rows in parts
    ]
    return max(counts, default=0)


def have_images(*parts: Sequence[Row]) -> bool:
    """Returns whether any row has an image."""
    return most_images(*parts) > 0


def row_without(column: str, *parts: Sequence[Row]) -> str | None:
    """Returns the `prompt_id` of the first row that lacks a column which other rows have; None where none has it."""
    if not any(column in names for rows in parts for names in _sets_of_columns(rows)):
        return None
    for rows in parts:
        if isinstance(rows, Rows):
            place = rows.first_without(column)
        else:
            place = next((number for number, row in enumerate(rows) if column not in row), None)
        if place is not None:
            return str(rows[place]["prompt_id"])
    return None


def _sources(
    values: Sequence[str],
    flags: DataFlags,
    labels: set[str] | None = None,
    streaming: bool = False,
) -> list[Source]:
    """Returns the sources that values name. Raises as `open_sources`."""
    sources = open_sources(values, labels, flags.use_hf, streaming)
    before = f"{flags.task}/" if flags.task else ""
    return [
        replace(source, whole=flags.whole, pairs=flags.pairs, label=f"{before}{source.label}")
        for source in sources
    ]


def _check_column_names(sources: Sequence[Source], flags: DataFlags) -> None:
    """Every column that `--columns` renames is in the first rows of some dataset."""
    if not flags.columns:
        return
    firsts = (
        raw
        for source in sources
        for raw in islice(source.rows("train", _LOOKED_AT, flags.seed), _LOOKED_AT)
    )
    there = sorted({name for raw in firsts for name in raw.row})
    missing = [
        name for name in flags.columns if name.lower() not in {known.lower() for known in there}
    ]
    if missing:
        raise UsageError(
            f"--columns: no dataset has a column {missing[0]}; there are {', '.join(there)}"
        )


def _take_out(rows: Rows, count: int, seed: int) -> tuple[Rows, Rows]:
    """Splits rows into (kept, taken out): `count` different prompts, never more than half of them.

    Rows with the same messages always end up on the same side, so no prompt is in both.
    """
    import numpy as np
    from pyarrow import array, compute

    keys = rows.column("key")
    # where each prompt is for the first time
    different = np.sort(np.unique(keys, return_index=True)[1])
    most = len(different) // 2
    if count > most:
        _logger.warning(
            "only %d of %d different prompts are held out: %d were asked for",
            most,
            len(different),
            count,
        )
    out = different[_choice(len(different), min(count, most), f"{seed}:held out")]
    is_out = compute.is_in(array(keys), value_set=array(keys[out])).to_numpy(zero_copy_only=False)
    del keys, different  # of many rows, before as much is made again
    return rows.chosen(np.flatnonzero(~is_out)), rows.chosen(out)


def _mixed(training: Sequence[Rows], flags: DataFlags) -> Rows:
    """Returns rows of all parts as `datasets.interleave_datasets` mixes them; some of them several times."""
    import numpy as np
    from datasets import Dataset, interleave_datasets

    ends = np.cumsum([len(rows) for rows in training])
    places = [
        Dataset.from_dict({"place": np.arange(end - len(rows), end)})
        for rows, end in zip(training, ends, strict=True)
    ]
    shares = list(flags.interleave_prob or ())
    mixed = interleave_datasets(
        places, shares, flags.seed, stopping_strategy=flags.stopping_strategy
    )
    rows = Rows.joined(training).chosen(mixed.with_format("numpy")[:]["place"])
    _logger.info("--interleave_prob: %d rows of %d", len(rows), ends[-1])
    return rows


def _choice(among: int, count: int, seed: str) -> list[int]:
    """Returns `count` places, in rising order."""
    return sorted(random.Random(seed).sample(range(among), count))


def _shares(total: int, parts: int) -> list[int]:
    """Returns a total in so many parts that differ by one at most."""
    return [total // parts + (number < total % parts) for number in range(parts)]
