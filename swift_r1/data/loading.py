"""`--dataset` and its relatives -> training rows and held-out rows. Nothing here tokenises."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

from swift_r1.data.choosing import Sampler, choice, shares, take_out
from swift_r1.data.prepare import Options, prepare, request_of, require_rows
from swift_r1.data.resolve import open_sources
from swift_r1.data.rows import Drops, Row, preprocessed
from swift_r1.data.sources import Source, Split
from swift_r1.data.store import Part
from swift_r1.data.streaming import RowStream
from swift_r1.data.view import Rows
from swift_r1.errors import UsageError

_logger = logging.getLogger("swift_r1.data")
_LOOKED_AT = 100  # rows of a dataset that tell its columns


@dataclass(frozen=True, slots=True)
class LoadedData:
    """The rows of a run. A row is a dict: `messages`, the dataset's columns, `dataset`, `prompt_id`.

    Attributes:
        train: in the order of the data (the sampler shuffles).
        eval: held out; empty where the run does not evaluate.
        broken: rows left out because they could not be read or preprocessed.
        prepared: where the rows lie, for the run's other processes (`Options.prepared`).
    """

    train: Sequence[Row]
    eval: Sequence[Row]
    broken: int = 0
    prepared: Mapping[str, str] = field(default_factory=dict, compare=False)


class _Loading:
    """Collects the rows of sources."""

    def __init__(self, args: Any, prepared: Mapping[str, str] | None, keep: bool) -> None:
        self.seed, self.options = _seed(args), options_of(args, prepared, keep)
        self.shuffle = getattr(args, "dataset_shuffle", True)
        self.drops: list[Drops] = []
        self.made: dict[str, str] = {}

    def sampler(self) -> Sampler:
        return Sampler(self.seed, self.shuffle)

    def collect(
        self, source: Source, split: Split, wanted: int | None, sampler: Sampler, *, repeat: bool = True
    ) -> Rows:
        """`wanted` good rows of a source (all, if None), reported and never empty."""
        count = wanted if source.samples_itself else None
        store = prepare(source, split, count, self.seed, self.options)
        self.made[request_of(source, split, count, self.seed, self.options.columns)] = str(store.folder)
        self.drops.append(store.drops)
        sampler.next_dataset()
        there = len(store)
        if wanted is not None and there < wanted and repeat and not self.options.prepared:
            _logger.info("dataset %s has %d rows, repeated to make %d", source.name, there, wanted)
        if wanted is None or (there < wanted and not repeat) or there == wanted:
            places: Sequence[int] = range(there)
        else:
            places = sampler.places(there, wanted)
        tag = "/eval" if split == "eval" and source.has_held_out else ""
        return Rows([Part(store, source.name, source.label + tag, places)])


def options_of(args: Any, prepared: Mapping[str, str] | None = None, keep: bool = False) -> Options:
    """How the data flags of `args` say that rows are prepared."""
    return Options(
        columns=dict(args.columns or {}),
        strict=getattr(args, "strict", False),
        processes=getattr(args, "dataset_num_proc", 1),
        use_cache=getattr(args, "load_from_cache_file", True),
        prepared=prepared or {},
        keep=keep,
    )


def sources_of(
    args: Any, values: Sequence[str], labels: set[str] | None = None, *, streaming: bool = False
) -> list[Source]:
    """`--dataset` or `--val_dataset` resolved, as the other data flags say.

    Raises:
        UsageError: all faults of all values, one a line.
    """
    return open_sources(values, labels, getattr(args, "use_hf", None), streaming)


def load_rows(args: Any, prepared: Mapping[str, str] | None = None, *, keep: bool = False) -> LoadedData:
    """All rows that the data flags of `args` name, and those held out where the run evaluates.

    The held-out rows are those of `--val_dataset`; else the share `--split_dataset_ratio` of each dataset; else,
    where the run evaluates, each dataset's own held-out split or rows taken out of its training rows,
    `--eval_limit` in all. The same arguments give the same rows in every process.

    Args:
        args: the flags.
        prepared: of the launcher's `LoadedData`, so that nothing is preprocessed twice.
        keep: this is the launcher.

    Raises:
        UsageError: unknown dataset, unreadable file, a `--columns` name that no dataset has, a column with a name of
            ours, no row left.
    """
    if getattr(args, "streaming", False):
        return _load_streamed(args, prepared, keep)
    if args.val_dataset and args.split_dataset_ratio:
        raise UsageError("--val_dataset and --split_dataset_ratio both name held-out rows: give one")
    labels: set[str] = set()
    sources = sources_of(args, args.dataset, labels)
    loading = _Loading(args, prepared, keep)
    seed = loading.seed
    if not prepared:
        _check_column_names(sources, loading.options.columns, seed)
    sampler = loading.sampler()
    training = [loading.collect(source, "train", source.spec.sample, sampler) for source in sources]

    held_out = Rows()
    evaluates = args.eval_steps is not None or args.eval_on_start
    sampler = loading.sampler()
    if args.val_dataset and evaluates:
        for source in sources_of(args, args.val_dataset, labels):
            wanted = source.spec.sample or (args.eval_limit if source.samples_itself else None)
            held_out += loading.collect(source, "eval", wanted, sampler)
        _warn_overlap(training, held_out)
    elif args.split_dataset_ratio:
        for number, rows in enumerate(training):
            share = max(1, int(args.split_dataset_ratio * len(rows)))
            training[number], out = take_out(rows, min(share, len(rows) - 1), seed)
            held_out += out
    elif evaluates and not getattr(args, "eval_datasets", ()):
        for number, (source, quota) in enumerate(zip(sources, shares(args.eval_limit, len(sources)), strict=True)):
            if quota and source.has_held_out:
                held_out += loading.collect(source, "eval", quota, sampler, repeat=False)
            elif quota:
                training[number], out = take_out(training[number], quota, seed)
                held_out += out
    if len(held_out) > args.eval_limit:
        _logger.info("evaluating on %d of %d held-out rows (--eval_limit)", args.eval_limit, len(held_out))
        held_out = held_out.chosen(choice(len(held_out), args.eval_limit, f"{seed}:eval"))
    train = Rows(part for rows in training for part in rows.parts)
    if not train:
        raise UsageError("no training row is left; see the causes above")
    if not keep:
        _logger.info("data: %d training rows, %d held out", len(train), len(held_out))
    return LoadedData(train, held_out, sum(one.broken for one in loading.drops), loading.made)


def _load_streamed(args: Any, prepared: Mapping[str, str] | None, keep: bool) -> LoadedData:
    """The first training rows of every dataset, for checks, and the held-out rows."""
    train = preview_rows(args, held_out=False).train
    loading = _Loading(args, prepared, keep)
    held_out, sampler = Rows(), loading.sampler()
    if args.eval_steps is not None or args.eval_on_start:
        sources = sources_of(args, args.val_dataset or args.dataset, set())
        for source, quota in zip(sources, shares(args.eval_limit, len(sources)), strict=True):
            if not args.val_dataset and not source.has_held_out:
                raise UsageError(
                    f"--streaming true takes no held-out rows out of the training rows: give --val_dataset "
                    f"({source.name} has no held-out split)"
                )
            wanted = source.spec.sample if args.val_dataset else None
            held_out += loading.collect(source, "eval", wanted or quota, sampler, repeat=False)
    return LoadedData(train, held_out, sum(one.broken for one in loading.drops), loading.made)


def stream_of(args: Any, first: int, fits: Callable[[Row], bool]) -> RowStream:
    """The training rows of `--streaming true`; `first` of them are there before more are read.

    Raises:
        UsageError: all faults of all `--dataset` values, one a line.
    """
    return RowStream(
        sources=sources_of(args, args.dataset, streaming=True),
        options=options_of(args),
        seed=_seed(args),
        shuffle=args.dataset_shuffle,
        buffer=args.shuffle_buffer_size,
        first=first,
        fits=fits,
    )


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

    Without `shuffle`, `#N` takes the first rows. Rows stay in the order of the data.

    Raises:
        UsageError: as `load_rows`.
    """
    values = [datasets] if isinstance(datasets, str) else list(datasets)
    data = load_rows(
        SimpleNamespace(
            dataset=values,
            val_dataset=[],
            split_dataset_ratio=split_dataset_ratio,
            columns=columns,
            data_seed=seed,
            eval_steps=None,
            eval_on_start=False,
            eval_limit=sys.maxsize,
            dataset_num_proc=num_proc,
            load_from_cache_file=load_from_cache_file,
            dataset_shuffle=shuffle,
            use_hf=use_hf,
            strict=strict,
        )
    )
    return data.train, data.eval


def preview_rows(args: Any, count: int = 4, held_out: bool = True) -> LoadedData:
    """The first good rows of every dataset, for checks before any model loads. Reads no more than it must.

    Raises:
        UsageError: as `load_rows`, as far as the first rows show it.
    """
    seed, options = _seed(args), options_of(args)
    labels: set[str] = set()
    training = sources_of(args, args.dataset, labels, streaming=True)
    validation = sources_of(args, args.val_dataset if held_out else [], labels, streaming=True)
    _check_column_names(training, options.columns, seed)

    def first(source: Source, split: Split) -> list[Row]:
        drops = Drops()
        raws = source.rows(split, count if source.samples_itself else None, seed)
        rows = list(islice(preprocessed(source, raws, options.columns, drops, strict=options.strict), count))
        require_rows(source, len(rows), drops)
        return rows

    train = [row for source in training for row in first(source, "train")]
    return LoadedData(train, [row for source in validation for row in first(source, "eval")])


def columns_of(data: LoadedData) -> frozenset[str]:
    """The columns that every row has, so that a reward can rely on them; `messages` and our own are among them."""
    parts = [rows for rows in (data.train, data.eval) if len(rows)]
    sets = [
        rows.columns() if isinstance(rows, Rows) else frozenset.intersection(*map(frozenset, rows)) for rows in parts
    ]
    return frozenset.intersection(*sets) if sets else frozenset()


def _check_column_names(sources: Sequence[Source], columns: Mapping[str, str], seed: int) -> None:
    """Every column that `--columns` renames is in the first rows of some dataset."""
    if not columns:
        return
    firsts = (raw for source in sources for raw in islice(source.rows("train", _LOOKED_AT, seed), _LOOKED_AT))
    there = sorted({name for raw in firsts for name in raw.row})
    missing = [name for name in columns if name.lower() not in {known.lower() for known in there}]
    if missing:
        raise UsageError(f"--columns: no dataset has a column {missing[0]}; there are {', '.join(there)}")


def _warn_overlap(training: Sequence[Rows], held_out: Rows) -> None:
    shared = len(set(held_out.keys()).intersection(key for rows in training for key in rows.keys()))  # noqa: SIM118
    if shared:
        _logger.warning("%d prompts of --val_dataset are in the training rows too", shared)


def _seed(args: Any) -> int:
    return args.seed if args.data_seed is None else args.data_seed
