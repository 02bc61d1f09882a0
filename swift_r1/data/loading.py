"""`--dataset` and its relatives -> training rows and held-out rows. Nothing here tokenises."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

from swift_r1.data.rows import Drops, Row, preprocessed, prompt_key
from swift_r1.data.sources import Source, Split, open_sources
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
    """

    train: Sequence[Row]
    eval: Sequence[Row]
    broken: int = 0


def load_rows(args: Any) -> LoadedData:
    """All rows that the data flags of `args` name, and those held out where the run evaluates.

    The held-out rows are those of `--val_dataset`; else the share `--split_dataset_ratio` of each dataset; else,
    where the run evaluates, each dataset's own held-out split or rows taken out of its training rows,
    `--eval_limit` in all. The same arguments give the same rows in every process.

    Raises:
        UsageError: unknown dataset, unreadable file, a `--columns` name that no dataset has, a column with a name of
            ours, no row left.
    """
    seed = _seed(args)
    if args.val_dataset and args.split_dataset_ratio:
        raise UsageError("--val_dataset and --split_dataset_ratio both name held-out rows: give one")
    labels: set[str] = set()
    sources = open_sources(args.dataset, labels)
    columns = dict(args.columns or {})
    _check_column_names(sources, columns, seed)
    drops: list[Drops] = []
    training = [_collect(source, "train", source.spec.sample, seed, columns, drops) for source in sources]

    held_out: list[Row] = []
    evaluates = args.eval_steps is not None or args.eval_on_start
    if args.val_dataset and evaluates:
        for source in open_sources(args.val_dataset, labels):
            wanted = source.spec.sample or (args.eval_limit if source.samples_itself else None)
            held_out += _collect(source, "eval", wanted, seed, columns, drops)
        _warn_overlap(training, held_out)
    elif args.split_dataset_ratio:
        for number, rows in enumerate(training):
            share = max(1, round(args.split_dataset_ratio * len(rows)))
            training[number], out = take_out(rows, min(share, len(rows) - 1), seed)
            held_out += out
    elif evaluates and not getattr(args, "eval_datasets", ()):
        for number, (source, quota) in enumerate(zip(sources, _shares(args.eval_limit, len(sources)), strict=True)):
            if quota and source.has_held_out:
                held_out += _collect(source, "eval", quota, seed, columns, drops, repeat=False)
            elif quota:
                training[number], out = take_out(training[number], quota, seed)
                held_out += out
    if len(held_out) > args.eval_limit:
        _logger.info("evaluating on %d of %d held-out rows (--eval_limit)", args.eval_limit, len(held_out))
        held_out = _sample(held_out, args.eval_limit, f"{seed}:eval")
    train = [row for rows in training for row in rows]
    if not train:
        raise UsageError("no training row is left; see the causes above")
    _logger.info("data: %d training rows, %d held out", len(train), len(held_out))
    return LoadedData(train, held_out, sum(one.broken for one in drops))


def load_dataset(
    datasets: str | Sequence[str],
    *,
    split_dataset_ratio: float = 0.0,
    seed: int = 42,
    columns: Mapping[str, str] | None = None,
) -> tuple[Sequence[Row], Sequence[Row]]:
    """ms-swift's call for scripts and plugins: the rows of `--dataset` values as (training, held out).

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
        )
    )
    return data.train, data.eval


def preview_rows(args: Any, count: int = 4) -> LoadedData:
    """The first good rows of every dataset, for checks before any model loads. Reads no more than it must.

    Raises:
        UsageError: as `load_rows`, as far as the first rows show it.
    """
    seed, columns = _seed(args), dict(args.columns or {})
    labels: set[str] = set()
    training, validation = open_sources(args.dataset, labels), open_sources(args.val_dataset, labels)
    _check_column_names(training, columns, seed)

    def first(source: Source, split: Split) -> list[Row]:
        drops = Drops()
        raws = source.rows(split, count if source.samples_itself else None, seed)
        rows = list(islice(preprocessed(source, raws, columns, drops), count))
        _require_rows(source, rows, drops)
        return rows

    train = [row for source in training for row in first(source, "train")]
    return LoadedData(train, [row for source in validation for row in first(source, "eval")])


def columns_of(data: LoadedData) -> frozenset[str]:
    """The columns that every row has, so that a reward can rely on them; `messages` and our own are among them."""
    rows = [*data.train, *data.eval]
    kinds = {tuple(row) for row in rows}
    return frozenset.intersection(*(frozenset(kind) for kind in kinds)) if kinds else frozenset()


def take_out(rows: Sequence[Row], count: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Splits rows into (kept, taken out): `count` different prompts, never more than half of them.

    Rows with the same messages always end up on the same side, so no prompt is in both.
    """
    by_key: dict[str, Row] = {}
    keys = [prompt_key(row) for row in rows]
    for key, row in zip(keys, rows, strict=True):
        by_key.setdefault(key, row)
    most = len(by_key) // 2
    if count > most:
        _logger.warning("only %d of %d different prompts are held out: %d were asked for", most, len(by_key), count)
    chosen = set(_sample(list(by_key), min(count, most), f"{seed}:held out"))
    kept = [row for key, row in zip(keys, rows, strict=True) if key not in chosen]
    return kept, [row for key, row in by_key.items() if key in chosen]


def _collect(
    source: Source,
    split: Split,
    wanted: int | None,
    seed: int,
    columns: Mapping[str, str],
    drops: list[Drops],
    repeat: bool = True,
) -> list[Row]:
    """`wanted` good rows of a source (all, if None), reported and never empty."""
    account = Drops()
    drops.append(account)
    tag = "/eval" if split == "eval" and source.has_held_out else ""
    if source.samples_itself:
        raws = list(source.rows(split, wanted, seed))
    else:
        raws = list(source.rows(split, None, seed))
        if wanted is not None:
            random.Random(f"{seed}:{source.label}").shuffle(raws)
    rows = list(islice(preprocessed(source, raws, columns, account, tag), wanted))
    _require_rows(source, rows, account)
    if account.broken:
        _logger.warning(
            "dataset %s: %d of %d rows left out, for example:\n  %s",
            *(source.name, account.broken, account.seen, "\n  ".join(account.examples)),
        )
    if account.filtered:
        _logger.info("dataset %s: its preprocessor filtered %d rows out", source.name, account.filtered)
    if repeat and wanted is not None and len(rows) < wanted:
        _logger.info("dataset %s has %d rows, repeated to make %d", source.name, len(rows), wanted)
        rows = [_copy(row, turn // len(rows)) for turn, row in enumerate(islice(cycle(rows), wanted))]
    return rows


def _copy(row: Row, turn: int) -> Row:
    return row if turn == 0 else {**row, "prompt_id": f"{row['prompt_id']}+{turn}"}


def _require_rows(source: Source, rows: Sequence[Row], drops: Drops) -> None:
    if rows:
        return
    if not drops.seen:
        raise UsageError(f"dataset {source.spec.raw} has no rows")
    causes = "; ".join(drops.examples) or "its preprocessor filtered all of them out"
    raise UsageError(f"dataset {source.spec.raw}: none of its {drops.seen} rows can be used: {causes}")


def _check_column_names(sources: Sequence[Source], columns: Mapping[str, str], seed: int) -> None:
    """Every column that `--columns` renames is in the first rows of some dataset."""
    if not columns:
        return
    firsts = (raw for source in sources for raw in islice(source.rows("train", _LOOKED_AT, seed), _LOOKED_AT))
    there = sorted({name for raw in firsts for name in raw.row})
    missing = [name for name in columns if name.lower() not in {known.lower() for known in there}]
    if missing:
        raise UsageError(f"--columns: no dataset has a column {missing[0]}; there are {', '.join(there)}")


def _warn_overlap(training: Sequence[Sequence[Row]], held_out: Sequence[Row]) -> None:
    keys = {prompt_key(row) for row in held_out}
    shared = len({key for rows in training for row in rows if (key := prompt_key(row)) in keys})
    if shared:
        _logger.warning("%d prompts of --val_dataset are in the training rows too", shared)


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (number < total % parts) for number in range(parts)]


def _sample(items: Sequence[Any], count: int, seed: str) -> list[Any]:
    """`count` of the items, in their order."""
    picked = sorted(random.Random(seed).sample(range(len(items)), count))
    return [items[index] for index in picked]


def _seed(args: Any) -> int:
    return args.seed if args.data_seed is None else args.data_seed
