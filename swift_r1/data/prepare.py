"""From a source to a store of prepared rows: read, preprocess, keep. With several processes on request."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from swift_r1.data.fingerprint import fingerprint
from swift_r1.data.rows import Drops, content_bytes, prompt_key, results
from swift_r1.data.sources import Source, Split, Task
from swift_r1.data.store import RUN_ONLY, Block, Store, StoreWriter, cache_folder, remove_old, whole_store
from swift_r1.errors import UsageError
from swift_r1.runtime.processes import end_with_parent

_logger = logging.getLogger("swift_r1.data")
_CHUNK = 2_000  # rows that are handed to a process at once
_BAR_AFTER_S = 1.0
_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """How rows are prepared.

    Attributes:
        columns: dataset column -> name wanted.
        seed: for a loader that samples itself.
        strict: a broken row is an error.
        processes: that preprocess.
        use_cache: rows that were prepared before may be used.
        prepared: stores that the launcher has made for this run, by request.
        keep: rows that no later run can use are left on the disk for this run's other processes.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 42
    strict: bool = False
    processes: int = 1
    use_cache: bool = True
    prepared: Mapping[str, str] = field(default_factory=dict)
    keep: bool = False


def request_of(source: Source, split: Split, count: int | None, options: Options) -> str:
    """What tells one preparation of a run from the others, without looking at the data."""
    return json.dumps([source.spec.raw, source.label, split, count, options.seed, dict(options.columns)])


def prepare(source: Source, split: Split, count: int | None, options: Options) -> Store:
    """The prepared rows of a split; `count` matters only to a loader that samples itself.

    Raises:
        UsageError: the source cannot be read, has no row or none that can be used, or has a column with a reserved
            name; with `strict`, a broken row.
    """
    request = request_of(source, split, count, options)
    if (folder := options.prepared.get(request)) and (made := whole_store(Path(folder))):
        if made.folder.name.startswith(RUN_ONLY):
            shutil.rmtree(folder, ignore_errors=True)  # who has it open can still read it
        return made
    cache = cache_folder()
    key = _key(source, split, count, options)
    if key is not None and options.use_cache and (kept := whole_store(cache / key)):
        _logger.info(
            "dataset %s: %s prepared rows from the cache, %s (--load_from_cache_file false prepares them again)",
            *(source.name, f"{len(kept):,}", kept.folder),
        )
        with contextlib.suppress(OSError):  # a shared, read-only cache
            os.utime(kept.folder)
        if options.strict and kept.drops.broken:
            raise UsageError(f"--strict true: dataset {source.name}: {kept.drops.examples[0]}")
        _report(source, kept.drops)
        return kept
    try:
        return _made(source, split, count, options, cache / (key or f"{RUN_ONLY}{uuid.uuid4().hex}"))
    except OSError as error:
        raise UsageError(
            f"dataset {source.name}: its rows cannot be kept in {cache}: {error.strerror or error} "
            "(SWIFT_R1_CACHE names another folder)"
        ) from error


def _key(source: Source, split: Split, count: int | None, options: Options) -> str | None:
    """Under what prepared rows are kept; None where the content of the source or its code cannot be determined."""
    identity = source.identity(split, count, options.seed)
    code = fingerprint([source.preprocess, dict(source.of_subset)])
    if identity is None or code is None:
        return None
    text = json.dumps([identity, code, sorted(options.columns.items()), source.name])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _made(source: Source, split: Split, count: int | None, options: Options, folder: Path) -> Store:
    started = time.perf_counter()
    with StoreWriter(folder.parent) as writer:
        remove_old(folder.parent)
        tasks = source.tasks(split, count, options.seed, _CHUNK)
        processes = options.processes
        if processes > 1 and not may_fork():
            _logger.info("dataset %s: this process has threads, so it prepares the rows alone", source.name)
            processes = 1
        if processes > 1:
            blocks = _parallel(source, tasks, options, processes)
        else:
            blocks = (_block_of(source, task, options) for task in tasks)
        for block in _with_progress(blocks, f"preparing {source.name}", count):
            writer.add(block)
        require_rows(source, writer.count, writer.drops)
        seconds = time.perf_counter() - started
        if seconds > 2:
            _logger.info("dataset %s: %s rows prepared in %.0f s", source.name, f"{writer.count:,}", seconds)
        _report(source, writer.drops)
        store = writer.finish(folder, replace=not options.use_cache)
    if folder.name.startswith(RUN_ONLY) and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return store


def may_fork() -> bool:
    """A process that has threads must not fork. The launcher has none, and the trainer uses the launcher's rows."""
    return threading.active_count() == 1


def require_rows(source: Source, count: int, drops: Drops) -> None:
    """Raises UsageError, with the causes, where no row is left."""
    if count:
        return
    if not drops.seen:
        raise UsageError(f"dataset {source.spec.raw} has no rows")
    causes = "; ".join(drops.examples) or "its preprocessor filtered all of them out"
    raise UsageError(f"dataset {source.spec.raw}: none of its {drops.seen} rows can be used: {causes}")


def _report(source: Source, drops: Drops) -> None:
    if drops.broken:
        _logger.warning(
            "dataset %s: %d of %d rows left out, for example:\n  %s",
            *(source.name, drops.broken, drops.seen, "\n  ".join(drops.examples)),
        )
    if drops.filtered:
        _logger.info("dataset %s: its preprocessor filtered %d rows out", source.name, drops.filtered)


def _with_progress(blocks: Iterable[Block], what: str, total: int | None) -> Iterator[Block]:
    """The blocks. A bar on standard error counts raw rows; where that is no terminal, a log line now and then."""
    started = logged = time.monotonic()
    done = 0
    with contextlib.ExitStack() as stack:
        show: Callable[[int], None] | None = None
        for block in blocks:
            yield block
            done += block.drops.seen
            now = time.monotonic()
            if sys.stderr.isatty():
                if show is None and now - started > _BAR_AFTER_S:
                    show = stack.enter_context(_bar(what, total))
                if show is not None:
                    show(done)
            elif now - logged > _LINE_EVERY_S:
                logged = now
                _logger.info("%s: %s%s rows", what, f"{done:,}", f" of {total:,}" if total else "")


@contextlib.contextmanager
def _bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


_job: tuple[Source, Options] | None = None  # of a worker process


def _parallel(source: Source, tasks: Iterable[Task], options: Options, processes: int) -> Iterator[Block]:
    """Blocks in order; a few more than the processes can work on are read ahead."""
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")  # plugins are loaded already
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker, initargs=(source, options))
    done = False
    try:
        coming = iter(tasks)
        waiting: deque[Future[Block]] = deque(pool.submit(_work, task) for task in islice(coming, 2 * processes))
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


def _start_worker(source: Source, options: Options) -> None:
    """The parent answers Ctrl-C; where it is killed, the kernel kills its processes."""
    global _job
    _job = (source, options)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        end_with_parent(signal.SIGKILL)


def _work(task: Task) -> Block:
    assert _job is not None
    source, options = _job
    return _block_of(source, task, options)


def _block_of(source: Source, task: Task, options: Options) -> Block:
    """Prepared rows of raw ones."""
    block = Block()
    for raw, part, row, line in results(source, source.task_rows(task), options.columns, block.drops, options.strict):
        key = hashlib.blake2b(prompt_key(row).encode(), digest_size=8).digest()
        block.add(row, line, int.from_bytes(key, "little"), raw.index, part, content_bytes(row))
    return block
