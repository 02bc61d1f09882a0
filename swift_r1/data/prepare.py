"""From a source to a store of prepared rows: read, preprocess, keep. With several processes on request.

The processes are not those of `Dataset.map`, which live on when their parent is killed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple
from itertools import islice
from pathlib import Path

from swift_r1.data.cache import RUN_ONLY, cache_folder
from swift_r1.data.fingerprint import fingerprint
from swift_r1.data.images import images_of
from swift_r1.data.rows import UNBOUNDED, Drops, content_bytes, prompt_key, results
from swift_r1.data.sources import DataFlags, Source, Split, Task
from swift_r1.data.store import RowBlock, RowStore, block_of, whole_store, write_store
from swift_r1.errors import UsageError
from swift_r1.runtime.processes import end_with_parent

_logger = logging.getLogger("swift_r1.data")
_of_rows = logging.getLogger("swift_r1.data.rows")
_CHUNK = 2_000  # rows that are handed to a process at once
_BAR_AFTER_S = 1.0
_LINE_EVERY_S = 10.0


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
) -> RowStore:
    """Returns the prepared rows of a split; `count` matters only to a loader that samples itself.

    Args:
        prepared: stores that the launcher has made for this run, by request.
        keep: rows that no later run can use are left on the disk for this run's other processes.

    Raises:
        UsageError: the source cannot be read, has no row or none that can be used, or has a column with a reserved
            name; with `strict`, a broken row.
    """
    path = prepared.get(request_key(source, split, count, flags))
    if path and (made := whole_store(Path(path))):
        if made.path.name.startswith(RUN_ONLY):
            made.path.unlink(missing_ok=True)  # who has it open can still read it
        return made
    cache = cache_folder()
    key = _key(source, split, count, flags)
    kept = whole_store(cache / key) if key is not None and flags.load_from_cache_file else None
    lost = None if kept is None else kept.lost_image()
    if lost is not None:
        _logger.info(
            "dataset %s: its rows are prepared again: the image %s is gone, or another than it was",
            *(source.name, lost),
        )
    elif kept is not None:
        _logger.info(
            "dataset %s: %s prepared rows from the cache, %s (--load_from_cache_file false prepares them again)",
            *(source.name, f"{len(kept):,}", kept.path),
        )
        with contextlib.suppress(OSError):  # a shared, read-only cache
            os.utime(kept.path)
        if flags.strict and kept.drops.broken:
            raise UsageError(f"--strict true: dataset {source.name}: {kept.drops.examples[0]}")
        report_drops(source, kept.drops)
        return kept
    try:
        store = _made(source, split, count, flags, cache / (key or f"{RUN_ONLY}{uuid.uuid4().hex}"))
    except OSError as error:
        raise UsageError(
            f"dataset {source.name}: its rows cannot be kept in {cache}: {error.strerror or error} "
            "(SWIFT_R1_CACHE names another folder)"
        ) from error
    if key is None and not keep:
        store.path.unlink(missing_ok=True)
    return store


def _key(source: Source, split: Split, count: int | None, flags: DataFlags) -> str | None:
    """Returns the name that prepared rows are kept under; None where the content of the source or its code cannot be
    determined."""
    identity = source.identity(split, count, flags.seed)
    code = fingerprint([source.preprocess, dict(source.of_subset)])
    if identity is None or code is None:
        return None
    about = [identity, code, sorted(flags.columns.items()), source.name, flags.tool_use.identity()]
    about.append(astuple(flags.image_rules))
    text = json.dumps([*about, "whole"] if source.whole else about)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _made(
    source: Source, split: Split, count: int | None, flags: DataFlags, path: Path
) -> RowStore:
    started = time.perf_counter()
    tasks = source.tasks(split, count, flags.seed, _CHUNK)
    processes = flags.dataset_num_proc
    if processes > 1 and not may_fork():
        _logger.info(
            "dataset %s: this process has threads, so it prepares the rows alone", source.name
        )
        processes = 1
    if processes > 1:
        blocks = _parallel(source, tasks, flags, processes)
    else:
        blocks = (_block_of(source, task, flags) for task in tasks)

    def check(rows: int, drops: Drops) -> None:
        require_rows(source, rows, drops)
        seconds = time.perf_counter() - started
        if seconds > 2:
            _logger.info(
                "dataset %s: %s rows prepared in %.0f s", source.name, f"{rows:,}", seconds
            )
        report_drops(source, drops)

    shown = _with_progress(blocks, f"preparing {source.name}", count)
    return write_store(path, shown, check)


def may_fork() -> bool:
    """Returns whether this process has no threads, beside which it must not fork. The launcher has none, and the
    trainer uses the launcher's rows."""
    return threading.active_count() == 1


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


def _with_progress(blocks: Iterable[RowBlock], what: str, total: int | None) -> Iterator[RowBlock]:
    """Yields the blocks. A bar on standard error counts raw rows; where that is no terminal, a log line now and
    then."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # it has no types
        # its thread would outlive the bar, and a process with threads does not fork
        monitor_interval = 0

    logged = time.monotonic()
    done = 0
    with Bar(
        desc=what, total=total, unit=" rows", delay=_BAR_AFTER_S, leave=False, disable=None
    ) as bar:
        for block in blocks:
            yield block
            done += block.drops.seen
            bar.update(block.drops.seen)
            if bar.disable and time.monotonic() - logged > _LINE_EVERY_S:
                logged = time.monotonic()
                _logger.info("%s: %s%s rows", what, f"{done:,}", f" of {total:,}" if total else "")


_job: tuple[Source, DataFlags] | None = None  # of a worker process


def _parallel(
    source: Source, tasks: Iterable[Task], flags: DataFlags, processes: int
) -> Iterator[RowBlock]:
    """Yields blocks in order; a few more than the processes can work on are read ahead."""
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")  # plugins are loaded already
    pool = ProcessPoolExecutor(
        processes, mp_context=context, initializer=_start_worker, initargs=(source, flags)
    )
    done = False
    try:
        coming = iter(tasks)
        waiting: deque[Future[RowBlock]] = deque(
            pool.submit(_work, task) for task in islice(coming, 2 * processes)
        )
        while waiting:
            block = waiting.popleft().result()
            waiting.extend(pool.submit(_work, task) for task in islice(coming, 1))
            yield block
        done = True
    except BrokenProcessPool as error:
        raise UsageError(
            f"dataset {source.name}: a process that prepared rows was killed (out of memory?); "
            f"--dataset_num_proc is {processes}"
        ) from error
    finally:
        if not done:  # an error or Ctrl-C: a preprocessor may hang
            for child in set(multiprocessing.active_children()) - before:
                child.kill()
        pool.shutdown(cancel_futures=True)


def _start_worker(source: Source, flags: DataFlags) -> None:
    """The parent answers Ctrl-C; where it is killed, the kernel kills its processes."""
    global _job
    _job = (source, flags)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        end_with_parent(signal.SIGKILL)


def _work(task: Task) -> RowBlock:
    assert _job is not None
    return _block_of(_job[0], task, _job[1])


def _block_of(source: Source, task: Task, flags: DataFlags) -> RowBlock:
    """Returns the prepared rows of a task's raw ones."""
    drops = Drops()
    rows = []
    raws = source.task_rows(task)
    for name, row, line in results(
        source, raws, flags.columns, drops, flags.strict, flags.tool_use, flags.image_rules
    ):
        images = images_of(row)
        rows.append(
            {
                "row": line + b"\n",
                "name": name,
                "key": _hash(prompt_key(row)),
                "id": 0 if row.get("id") is None else _hash(str(row["id"])),
                "size": UNBOUNDED if images else content_bytes(row),
                "turns": len(row["messages"]),
                "columns": _names(tuple(row)),
                "images": [image.path for image in images],
            }
        )
    return block_of(rows, drops)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(1000)
def _names(columns: tuple[str, ...]) -> str:
    return json.dumps(columns)
