"""The token record: what the loss saw and did of recorded completions, a Parquet file an optimizer step.

Files are whole or not there: written under a temporary name, synced, renamed, by a thread of its own that training
does not wait for. Where it cannot (a full or a slow disk) a file is left out, and a warning says so.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from swift_r1.errors import describe
from swift_r1.runtime.files import read_text

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

# of each token id its bytes, and whether it is a special token
Vocabulary = Sequence[tuple[bytes, bool]]

TOKENS = "tokens"  # the record's folder in a run folder
GIB = 2**30
_VOCABULARY = "vocabulary.parquet"
_STRIDE = "stride"
_FILE = re.compile(r"step-(\d+)\.parquet")
_TEMPORARY = ".writing-"
_PENDING_BYTES = 256 << 20  # most that waits to be written
_DEADLINE_S = 60.0  # for what is left to write, before a checkpoint and at the end

# Of a completion. `step` is the optimizer step, `round_step` what completions.jsonl has as `step`.
_COMPLETION = {
    "round_step": "int32",
    "prompt_id": "string",
    "request_id": "string",
    "number": "int16",
    "group": "int32",
    "sequence": "int16",
}
# Of its tokens: lists of one entry a token.
_TOKENS = {
    "token_ids": "int32",
    "mask": "bool",
    "written": "bool",
    "rollout_logps": "float",
    "logps": "float",
    "ratios": "float",
    "clipped": "int8",
    "entropies": "float",
    "advantages": "float",
    "weight_versions": "int32",
    "ref_logps": "float",
}

# Floats with their bytes of like significance together: a third smaller, and faster.
_SPLIT = [f"{name}.list.element" for name, kind in _TOKENS.items() if kind == "float"]
_ENCODING: Any = {
    "compression": "zstd",
    "use_byte_stream_split": _SPLIT,
    "use_dictionary": ["prompt_id", "request_id"],
}
# which take longer than all the rest of a small file
_ENCODING |= {"write_statistics": False, "store_schema": False}


@dataclass(frozen=True)
class TokenRows:
    """Recorded completions: `R` of them, of `K` tokens in all."""

    # `R`: round_step, prompt_id, request_id, number, group, sequence
    completions: Sequence[Mapping[str, Any]]
    prompt_lengths: numpy.ndarray  # int `[R]`
    prompt_token_ids: numpy.ndarray  # int `[sum of prompt lengths]`
    lengths: numpy.ndarray  # int `[R]`, of the completions
    tokens: Mapping[str, numpy.ndarray]  # `[K]` by column; a column that is not there is null
    # `R`, the experts that were replayed for prompt and completion; none: there is no such column
    routes: Sequence[bytes] = ()

    @property
    def nbytes(self) -> int:
        routes = sum(map(len, self.routes))
        return routes + sum(one.nbytes for one in (self.prompt_token_ids, *self.tokens.values()))

    def table(self, step: int) -> pyarrow.Table:
        import pyarrow as pa

        def lists(values: numpy.ndarray | None, lengths: numpy.ndarray, kind: str) -> pa.Array:
            of = pa.type_for_alias(kind)
            if values is None:
                return pa.nulls(len(lengths), pa.list_(of))
            offsets = numpy.concatenate([[0], lengths.cumsum()]).astype(numpy.int32)
            return pa.ListArray.from_arrays(
                offsets, pa.array(values.astype(of.to_pandas_dtype(), copy=False))
            )

        columns = {"step": pa.array([step] * len(self.completions), "int32")}
        columns |= {
            name: pa.array([row.get(name) for row in self.completions], kind)
            for name, kind in _COMPLETION.items()
        }
        columns["prompt_token_ids"] = lists(self.prompt_token_ids, self.prompt_lengths, "int32")
        columns |= {
            name: lists(self.tokens.get(name), self.lengths, kind) for name, kind in _TOKENS.items()
        }
        if self.routes:
            columns["routes"] = pa.array(self.routes, "binary")
        return pa.table(columns)


class TokenWriter:
    """Writes the record of a run to `folder`, beginning with the vocabulary. No method raises for the disk's sake.

    Once the steps' files are over `limit` bytes, those of every second step go, of the run so far and from then on; and
    so again. Which they are does not depend on where a run was killed: the stride is in a file and never goes back.
    """

    def __init__(self, folder: Path, limit: float, vocabulary: Callable[[], Vocabulary]) -> None:
        self.folder = folder
        self.limit = limit
        self._vocabulary = vocabulary
        self._changed = threading.Condition()
        self._pending: deque[tuple[int, TokenRows]] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._left_out = 0
        self._stride = 1
        self._sizes: dict[int, int] = {}  # bytes of the steps' files

    def write(self, step: int, rows: TokenRows) -> None:
        """Takes the rows of a step; does not wait for the disk."""
        with self._changed:
            if (
                self._pending
                and sum(one.nbytes for _, one in self._pending) + rows.nbytes > _PENDING_BYTES
            ):
                self._leave_out(
                    _name(step), f"{_PENDING_BYTES >> 20} MiB wait for a slow disk already"
                )
                return
            self._pending.append((step, rows))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="token record", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Waits until all is written, for `_DEADLINE_S` at most."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._pending, _DEADLINE_S):
                logger.warning(
                    "after %g s %d files of the token record wait", _DEADLINE_S, len(self._pending)
                )

    def close(self) -> None:
        """Flushes; then ends the thread, unless it is stuck, and says how many files are not there."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and not self._pending:
            self._thread.join(_DEADLINE_S)
        if self._left_out > 1:
            logger.warning("%d files were left out of %s", self._left_out, self.folder)

    # The thread

    def _run(self) -> None:
        self._attempt(_VOCABULARY, self._write_vocabulary)
        self._attempt(_STRIDE, self._go_on)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                step, rows = self._pending[0]
            if step % self._stride == 0:
                self._attempt(_name(step), partial(self._write_rows, step, rows))
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()

    def _go_on(self) -> None:
        """After what an earlier process has left, which may have been killed while it thinned."""
        self._stride = stride_of(self.folder)
        self._sizes = _step_files(self.folder)
        self._remove_between()

    def _write_rows(self, step: int, rows: TokenRows) -> None:
        self._sizes[step] = self._put(_name(step), rows.table(step))
        while sum(self._sizes.values()) > self.limit:
            self._thin(2 * self._stride)

    def _thin(self, stride: int) -> None:
        self._put_bytes(_STRIDE, str(stride).encode())
        if self._stride == 1:
            logger.info(
                "the token record is over %g GiB (--log_tokens_limit): the files of every second step go, and so again",
                self.limit / GIB,
            )
        self._stride = stride
        self._remove_between()

    def _remove_between(self) -> None:
        for step in [step for step in self._sizes if step % self._stride]:
            (self.folder / _name(step)).unlink(missing_ok=True)
            del self._sizes[step]

    def _write_vocabulary(self) -> None:
        import pyarrow as pa

        if not (self.folder / _VOCABULARY).exists():
            tokens, special = zip(*self._vocabulary(), strict=True)
            columns = {
                "token_id": pa.array(range(len(tokens)), "int32"),
                "bytes": pa.array(tokens, "binary"),
            }
            self._put(_VOCABULARY, pa.table(columns | {"special": pa.array(special, "bool")}))

    def _put(self, name: str, table: pyarrow.Table) -> int:
        """Writes a Parquet file; returns its bytes."""
        import pyarrow as pa
        from pyarrow import parquet

        sink = pa.BufferOutputStream()
        parquet.write_table(table, sink, **_ENCODING)
        return self._put_bytes(name, sink.getvalue())

    def _put_bytes(self, name: str, content: bytes) -> int:
        self.folder.mkdir(exist_ok=True)
        draft = self.folder / f"{_TEMPORARY}{name}"
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.rename(self.folder / name)
        finally:
            draft.unlink(missing_ok=True)
        return len(content)

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  a run does not end for its record's sake
            self._leave_out(name, describe(error))

    def _leave_out(self, name: str, why: str) -> None:
        self._left_out += 1
        if self._left_out == 1:
            logger.warning(
                "%s is left out of the token record: %s; later files are tried all the same",
                name,
                why,
            )


def cut_record(run_dir: Path, step: int) -> None:
    """Removes what came after `step` (-1: all but the vocabulary), and what is half-written."""
    folder = run_dir / TOKENS
    for path in folder.iterdir() if folder.exists() else ():
        match = _FILE.fullmatch(path.name)
        if path.name.startswith(_TEMPORARY) or (match is not None and int(match[1]) > step):
            path.unlink()


def _name(step: int) -> str:
    return f"step-{step:06}.parquet"


def _step_files(folder: Path) -> dict[int, int]:
    """Returns the steps that have a file, and its bytes."""
    named = [(match, path) for path in folder.glob("*") if (match := _FILE.fullmatch(path.name))]
    return {int(match[1]): path.stat().st_size for match, path in named}


def stride_of(folder: Path) -> int:
    """Returns the steps' files that a record keeps: every one, every second, ..."""
    try:
        return int(read_text(folder / _STRIDE))
    except (OSError, ValueError):
        return 1
