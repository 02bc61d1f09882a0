"""From a source to prepared rows: read and preprocessed by `datasets`, by several processes on request, and kept in its
cache under a hash of the data, the preprocessor, the settings and the code that made them."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.data.cache import RUN_ONLY, cache_folder, kept_rows, mark_used, remove_old
from swift_r1.data.files import ProcessShare
from swift_r1.data.fingerprint import fingerprint
from swift_r1.data.images import images_of
from swift_r1.data.rows import UNBOUNDED, Drops, content_bytes, prompt_key, rows_as_json
from swift_r1.data.sources import DataFlags, Source, Split
from swift_r1.data.store import Rows, features
from swift_r1.errors import UsageError
from swift_r1.runtime.processes import end_with_parent

if TYPE_CHECKING:
    import datasets

_logger = logging.getLogger("swift_r1.data")
_of_rows = logging.getLogger("swift_r1.data.rows")
_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """The rows of a split, in order.

    Attributes:
        drops: what was left out.
        made: when they were read, in seconds since 1970.
        name: of the rows in the cache.
    """

    rows: Rows
    drops: Drops
    made: float
    name: str


@dataclass(frozen=True, slots=True)
class _Job:
    """Rows to be prepared by so many processes."""

    source: Source
    split: Split
    count: int | None
    flags: DataFlags
    processes: int
    thread: int = field(default_factory=threading.get_ident)

    def rows(self, number: int) -> Iterator[dict[str, Any]]:
        """Yields the columns of the rows of a process (`features`), then what was left out and what was wrong."""
        drops = Drops()
        faults: tuple[str, ...] = ()
        began = time.time()
        empty = dict.fromkeys([*features(), _ACCOUNT])
        share = ProcessShare(number, self.processes)
        raws = self.source.rows(self.split, self.count, self.flags.seed, share)
        logged = time.monotonic()
        try:
            for row, line in rows_as_json(self.source, raws, self.flags, drops):
                if time.monotonic() - logged > _LINE_EVERY_S and not sys.stderr.isatty():
                    logged = time.monotonic()  # a terminal has a bar
                    about = (self.source.name, f"{drops.seen:,}", number + 1, self.processes)
                    _logger.info("preparing %s: %s rows by process %d of %d", *about)
                images = images_of(row)
                yield empty | {
                    "row": line,
                    "key": _hash(prompt_key(row)),
                    "size": UNBOUNDED if images else content_bytes(row),
                    "turns": len(row["messages"]),
                    "columns": _names(tuple(row)),
                    "images": [image.path for image in images],
                }
        except UsageError as error:  # which no other process could raise as it is
            faults = error.faults
        yield empty | {_ACCOUNT: json.dumps([asdict(drops), faults, began])}


_UNFINISHED = ".incomplete"  # ends the folder of rows that `datasets` has not prepared to the end
_ACCOUNT = "account"  # a column of the last row of each process
_job: _Job | None = None


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@functools.lru_cache(1000)
def _names(columns: tuple[str, ...]) -> str:
    return json.dumps(columns)


def _rows_of(processes: list[int]) -> Iterator[dict[str, Any]]:
    """Yields the rows of `_job`, which forked processes inherit: no object of a user's has to be sent to them."""
    assert _job is not None
    for number in processes:
        yield from _job.rows(number)


@functools.cache
def _end_processes_with_parent() -> None:
    """Makes processes that are forked while rows are prepared end with their parent, however that ends. The parent
    answers Ctrl-C."""

    def start() -> None:
        if _job is None:
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # the kernel means the thread that forked: one that replaces dead processes ends before them
        if sys.platform == "linux" and threading.get_ident() == _job.thread:
            end_with_parent(signal.SIGKILL)

    os.register_at_fork(after_in_child=start)


def request_key(source: Source, split: Split, count: int | None, flags: DataFlags) -> str:
    """Returns what tells one preparation of a run from the others, without looking at the data."""
    return json.dumps(
        [
            source.spec.raw,
            source.label,
            split,
            count,
            flags.seed,
            dict(flags.columns),
            flags.tool_use.identity(),
        ]
    )


def prepared_rows(
    source: Source,
    split: Split,
    count: int | None,
    flags: DataFlags,
    prepared: Mapping[str, str],
    keep: bool,
) -> PreparedRows:
    """Returns the prepared rows of a split; `count` matters only to a loader that samples itself.

    Args:
        prepared: names of the rows that the launcher has prepared for this run, by request.
        keep: rows that no later run can use are left on the disk for this run's other processes.

    Raises:
        UsageError: the source cannot be read, has no row or none that can be used, or has a column with a reserved
            name; with `strict`, a broken row.
    """
    cache = cache_folder()
    name = prepared.get(request_key(source, split, count, flags))
    made = _kept(cache, name) if name is not None else None
    if made is not None:
        if made.name.startswith(RUN_ONLY):
            shutil.rmtree(kept_rows(cache, made.name))  # who has them open can still read them
        return made
    name = _name(source, split, count, flags)
    found = _kept(cache, name) if name is not None and flags.load_from_cache_file else None
    lost = None if found is None else found.rows.lost_image(found.made)
    if lost is not None:
        _logger.info(
            "dataset %s: its rows are prepared again: the image %s is gone, or another than it was",
            *(source.name, lost),
        )
    elif found is not None:
        _logger.info(
            "dataset %s: %s prepared rows from the cache, %s (--load_from_cache_file false prepares them again)",
            *(source.name, f"{len(found.rows):,}", kept_rows(cache, found.name)),
        )
        if flags.strict and found.drops.broken:
            raise UsageError(f"--strict true: dataset {source.name}: {found.drops.examples[0]}")
        report_drops(source, found.drops)
        return found
    processes = flags.dataset_num_proc if source.in_parts(count) else 1
    job = _Job(source, split, count, flags, processes)
    anew = lost is not None or not flags.load_from_cache_file
    made = _made(cache, job, name or f"{RUN_ONLY}{uuid.uuid4().hex}", anew)
    if name is None and not keep:
        shutil.rmtree(kept_rows(cache, made.name))
    return made


def _name(source: Source, split: Split, count: int | None, flags: DataFlags) -> str | None:
    """Returns the name that prepared rows are kept under; None where the content of the source or its code cannot be
    determined."""
    identity = source.identity(split, count, flags.seed)
    code = fingerprint([source.preprocess, dict(source.of_subset)])
    if identity is None or code is None:
        return None
    about: list[Any] = [identity, code, sorted(flags.columns.items()), source.name, source.label]
    about += [source.whole, source.pairs]
    text = json.dumps([*about, flags.tool_use.identity(), astuple(flags.image_rules)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _kept(cache: Path, name: str) -> PreparedRows | None:
    """Returns rows that are in the cache; None where they are not, or cannot be read, which is logged."""
    folder = kept_rows(cache, name)
    infos = folder.glob("*/dataset_info.json")
    if all(info.parent.suffix == _UNFINISHED for info in infos):
        return None
    try:
        found, _faults = _opened(_generated(cache, name), name)
    except (OSError, ValueError, LookupError, TypeError) as error:
        _logger.warning(
            "prepared rows in %s cannot be used, and are prepared again: %s", folder, error
        )
        shutil.rmtree(folder)
        return None
    mark_used(folder)
    return found


def _made(cache: Path, job: _Job, name: str, anew: bool) -> PreparedRows:
    """Prepares rows, `anew` in the place of those of that name. What is not finished is removed."""
    from filelock import FileLock

    global _job
    source = job.source
    started = time.perf_counter()
    folder = kept_rows(cache, name)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        remove_old(cache)
        with FileLock(cache / f"{name}.lock"):  # another run with the same data waits
            if anew:
                shutil.rmtree(folder, ignore_errors=True)
            for rest in folder.glob(f"*{_UNFINISHED}"):  # of a run that was killed
                shutil.rmtree(rest)
            _job = job
            found, faults = _opened(_generated(cache, name, job.processes), name)
    except OSError as error:
        raise UsageError(
            f"dataset {source.name}: its rows cannot be kept in {cache}: {error.strerror or error} "
            "(SWIFT_R1_CACHE names another folder)"
        ) from error
    finally:
        _job = None
    count = len(found.rows)
    if faults or not count:
        shutil.rmtree(folder, ignore_errors=True)
    if faults:
        raise UsageError(*faults)
    require_rows(source, count, found.drops)
    seconds = time.perf_counter() - started
    if seconds > 2:
        _logger.info("dataset %s: %s rows prepared in %.0f s", source.name, f"{count:,}", seconds)
    report_drops(source, found.drops)
    return found


def _generated(cache: Path, name: str, processes: int = 1) -> datasets.Dataset:
    """Returns the rows of that name as `datasets` has them in its cache, where `_job` is done unless they are there.
    Raises OSError: nothing can be written."""
    import datasets
    import multiprocess
    from datasets import Dataset, Features, Value
    from tqdm import tqdm

    tqdm.monitor_interval = (
        0  # its thread would outlive the bar, and no process is forked beside threads
    )
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    _end_processes_with_parent()
    try:
        return Dataset.from_generator(
            _rows_of,
            features=Features({**features(), _ACCOUNT: Value("string")}),
            cache_dir=str(cache),
            gen_kwargs={"processes": list(range(processes))},
            num_proc=processes if processes > 1 else None,
            fingerprint=name,
        )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        # of another process there is a traceback
        found = re.search(r"^OSError: (.*)$", str(error.__cause__), re.MULTILINE)
        if found is None:
            raise
        raise OSError(found[1]) from error
    except multiprocess.TimeoutError as error:  # of Ctrl-C, for which its processes have not ended
        raise (error.__context__ or error) from None
    except RuntimeError as error:
        raise UsageError(
            f"a process that prepared rows was killed (out of memory?); --dataset_num_proc is {processes}"
        ) from error


def _opened(data: datasets.Dataset, name: str) -> tuple[PreparedRows, list[str]]:
    """Returns prepared rows, and what was wrong with them."""
    import numpy as np
    from pyarrow import compute

    drops = Drops()
    faults: list[str] = []
    times: list[float] = []
    column = data.data.column(_ACCOUNT)
    for account in column.drop_null().to_pylist():
        left_out, wrong, began = json.loads(account)
        drops.merge(Drops(**left_out))
        faults += wrong
        times.append(began)
    places = np.flatnonzero(compute.is_null(column).to_numpy())
    rows = Rows(data.remove_columns(_ACCOUNT).select(places))
    return PreparedRows(rows, drops, min(times), name), faults


def require_rows(source: Source, count: int, drops: Drops) -> None:
    """Raises UsageError, with the causes, where no row is left."""
    if count:
        return
    if not drops.seen:
        raise UsageError(f"dataset {source.spec.raw} has no rows")
    causes = "; ".join(drops.examples) or "its preprocessor filtered all of them out"
    raise UsageError(
        f"dataset {source.spec.raw}: none of its {drops.seen} rows can be used: {causes}"
    )


def report_drops(source: Source, drops: Drops) -> None:
    if drops.broken:
        _of_rows.warning(
            "dataset %s: %d of %d rows left out, for example:\n  %s",
            *(source.name, drops.broken, drops.seen, "\n  ".join(drops.examples)),
        )
    if drops.filtered:
        _logger.info(
            "dataset %s: its preprocessor filtered %d rows out", source.name, drops.filtered
        )
