"""From a source to a store of prepared rows: read, preprocess, keep. By several processes if asked."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from swift_r1.data.cache import RUN_ONLY, remove_old, touch, writable_cache
from swift_r1.data.files import RawRow
from swift_r1.data.fingerprint import fingerprint
from swift_r1.data.progress import Progress
from swift_r1.data.rows import Drops, Row, prompt_key, results
from swift_r1.data.sources import Source, Split, Task
from swift_r1.data.store import Block, Store, StoreWriter, whole_store
from swift_r1.errors import UsageError
from swift_r1.runtime.processes import end_with_parent

_logger = logging.getLogger("swift_r1.data")
_CHUNK = 2_000  # rows that are handed to a process at once


@dataclass(frozen=True, slots=True)
class Options:
    """How rows are prepared.

    Attributes:
        columns: dataset column -> name wanted.
        strict: a broken row is an error.
        processes: that preprocess.
        use_cache: rows that were prepared before may be taken.
        prepared: stores that the launcher has made for this run, by request.
        keep: rows that no later run can take are left on the disk for this run's other processes.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    processes: int = 1
    use_cache: bool = True
    prepared: Mapping[str, str] = field(default_factory=dict)
    keep: bool = False


def request_of(source: Source, split: Split, count: int | None, seed: int, columns: Mapping[str, str]) -> str:
    """What tells one preparation of a run from the others, without a look at the data."""
    return json.dumps([source.spec.raw, source.label, split, count, seed, dict(columns)])


def prepare(source: Source, split: Split, count: int | None, seed: int, options: Options) -> Store:
    """The prepared rows of a split; `count` and `seed` matter only to a loader that samples itself.

    Raises:
        UsageError: the source cannot be read, has no row or none that can be used, has a column with a name of ours;
            with `strict`, a broken row.
    """
    request = request_of(source, split, count, seed, options.columns)
    if (folder := options.prepared.get(request)) and (made := whole_store(Path(folder))):
        if made.folder.name.startswith(RUN_ONLY):
            made.remove()
        return made
    cache = writable_cache()
    key = _key(source, split, count, seed, options.columns)
    if key is not None and options.use_cache and (kept := whole_store(cache / key)):
        _logger.info(
            "dataset %s: %s prepared rows from the cache, %s (--load_from_cache_file false prepares anew)",
            *(source.name, f"{len(kept):,}", kept.folder),
        )
        touch(kept.folder)
        if options.strict and kept.drops.broken:
            raise UsageError(f"--strict true: dataset {source.name}: {kept.drops.examples[0]}")
        _report(source, kept.drops)
        return kept
    try:
        return _made(source, split, count, seed, options, cache / (key or f"{RUN_ONLY}{uuid.uuid4().hex}"))
    except OSError as error:
        raise UsageError(
            f"dataset {source.name}: its rows cannot be kept in {cache}: {error.strerror or error} "
            "(SWIFT_R1_CACHE names another folder)"
        ) from error


def _key(source: Source, split: Split, count: int | None, seed: int, columns: Mapping[str, str]) -> str | None:
    """Under what prepared rows are kept; None where the source or its code cannot be told from others."""
    identity = source.identity(split, count, seed)
    code = fingerprint([source.preprocess, dict(source.of_subset)])
    if identity is None or code is None:
        return None
    text = json.dumps([identity, code, sorted(columns.items()), source.name])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _made(source: Source, split: Split, count: int | None, seed: int, options: Options, folder: Path) -> Store:
    started = time.perf_counter()
    with StoreWriter(folder.parent) as writer:
        remove_old(folder.parent)
        tasks = source.tasks(split, count, seed, _CHUNK)
        processes = options.processes
        if processes > 1 and not may_fork():
            _logger.info("dataset %s: this process has threads, so that it prepares the rows alone", source.name)
            processes = 1
        blocks = _parallel(source, tasks, options, processes) if processes > 1 else _serial(source, tasks, options)
        with Progress(f"preparing {source.name}", source.count(split, count)) as progress:
            for block in blocks:
                writer.add(block)
                progress.advance(block.drops.seen)
        require_rows(source, writer.count, writer.drops)
        seconds = time.perf_counter() - started
        if seconds > 2:
            _logger.info("dataset %s: %s rows prepared in %.0f s", source.name, f"{writer.count:,}", seconds)
        _report(source, writer.drops)
        store = writer.finish(folder, replace=not options.use_cache)
    if folder.name.startswith(RUN_ONLY) and not options.keep:
        store.remove()
    return store


def may_fork() -> bool:
    """A process that has threads must not fork. The launcher has none, and the trainer finds the launcher's rows."""
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


def _serial(source: Source, tasks: Iterable[Task], options: Options) -> Iterator[Block]:
    return (block_of(source, source.task_rows(task), options) for task in tasks)


_job: tuple[Source, Options] | None = None  # of the worker processes, which are forked with it


def _parallel(source: Source, tasks: Iterable[Task], options: Options, processes: int) -> Iterator[Block]:
    """Blocks in order; a few more than the processes can work on are read ahead."""
    global _job
    _job = (source, options)
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")  # plugins are loaded already
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_belong_to_the_parent)
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
        _job = None


def _belong_to_the_parent() -> None:
    """Ctrl-C is the parent's to answer; and where it is killed, the kernel kills its processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        end_with_parent(signal.SIGKILL)


def _work(task: Task) -> Block:
    assert _job is not None
    source, options = _job
    return block_of(source, source.task_rows(task), options)


def block_of(source: Source, raws: Iterable[RawRow], options: Options) -> Block:
    """Prepared rows of raw ones."""
    block = Block()
    numbers: dict[tuple[str, ...], int] = {}
    for raw, part, row, line in results(source, raws, options.columns, block.drops, options.strict):
        size = sum(len(message["content"].encode()) for message in row["messages"])
        block.lines += line + b"\n"
        block.ends.append(len(block.lines))
        block.keys.append(prompt_hash(row))
        block.raws.append(raw.index)
        block.sizes.append(size)
        block.turns.append(len(row["messages"]))
        block.parts.append(part)
        block.kinds.append(numbers.setdefault(tuple(row), len(numbers)))
    block.columns = list(numbers)
    return block


def prompt_hash(row: Row) -> int:
    """64 bits of a hash of the row's messages."""
    return int.from_bytes(hashlib.blake2b(prompt_key(row).encode(), digest_size=8).digest(), "little")
