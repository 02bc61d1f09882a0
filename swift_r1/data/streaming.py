"""The rows of `--streaming true`, read while the run trains. Their order is a function of the data, seed and position
alone, so resuming is exact.

`IterableDataset.shuffle` fills its whole buffer before the first row leaves, and the first round would wait for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from swift_r1.data.images import placeless
from swift_r1.data.preprocessors import Row
from swift_r1.data.rows import Drops, preprocessed
from swift_r1.data.sources import DataFlags, Source
from swift_r1.errors import UsageError

_logger = logging.getLogger("swift_r1.data")


@dataclass(frozen=True)
class RowStream:
    """Rows of several sources, one source after the other, again and again. Going back to a position is reading up to
    it again.

    Attributes:
        sources: where they come from; `#N` takes the first N good rows.
        flags: how they are prepared, and whether they leave in a random order among `shuffle_buffer_size` rows.
        first: rows that the run begins with; no more are read before that many have left.
        fits: False for rows that are left out (too long prompts).
    """

    sources: Sequence[Source]
    flags: DataFlags
    first: int
    fits: Callable[[Row], bool]

    def __iter__(self) -> Iterator[Row]:
        """Yields rows without an end; those of a later epoch have its number in their `prompt_id`. UsageError where a
        source cannot be read, or no row is left; with `strict`, where a row is broken."""
        for epoch in count():
            rows: Iterator[Row] = (
                row for source in self.sources for row in self._once(source, log=epoch == 0)
            )
            if self.flags.interleave_prob is not None:
                rows = self._mixed(epoch)
            if self.flags.dataset_shuffle:
                rows = shuffled(
                    rows, self.first, self.flags.shuffle_buffer_size, f"{self.flags.seed}:{epoch}"
                )
            found = 0
            for found, row in enumerate(rows, start=1):  # noqa: B007
                yield _named(row, "@", epoch)
            if not found:
                raise UsageError("no training row is left; see the causes above")
            _logger.info("--streaming true: %s rows were one epoch, the next begins", f"{found:,}")

    def _mixed(self, epoch: int) -> Iterator[Row]:
        """Yields the rows of one epoch with `--interleave_prob`, in the order of `datasets.interleave_datasets`."""
        running = [self._once(source, log=epoch == 0) for source in self.sources]
        coming = [next(rows, None) for rows in running]
        turns = [int(row is None) for row in coming]
        for number in drawn_sources(self.flags, epoch):
            if sum(map(bool, turns)) >= _ending(self.flags):
                return
            row = coming[number]
            if row is None:
                continue
            yield _named(row, "+", turns[number])
            following = next(running[number], None)
            if following is None:
                turns[number] += 1
                running[number] = self._once(self.sources[number], log=False)
                following = next(running[number], None)
            coming[number] = following

    def _once(self, source: Source, log: bool) -> Iterator[Row]:
        """Yields a source's rows of one epoch: all that fit, or `#N` of them, repeated where there are fewer."""
        flags = self.flags
        wanted = source.spec.sample
        drops = Drops()
        too_long = found = shown = 0
        for turn in count():
            before = found
            raws = source.rows("train", wanted, flags.seed)
            for row in preprocessed(
                source, raws, flags.columns, drops, flags.strict, flags.tool_use, flags.image_rules
            ):
                if log and turn == 0:
                    for example in drops.examples[shown:]:
                        _logger.warning("dataset %s: a row is left out: %s", source.name, example)
                    shown = len(drops.examples)
                if not self.fits(row):
                    too_long += 1
                    continue
                found += 1
                yield _named(row, "+", turn)
                if found == wanted:
                    break
            if wanted is None or found in (before, wanted):
                break
            if log and turn == 0:
                _logger.info(
                    "dataset %s has %d rows, repeated to make %d", source.name, found, wanted
                )
        if log and too_long:
            _logger.warning(
                "dataset %s: %d prompts left out: longer than --max_length or the model takes, or with images that its "
                "processor refuses",
                source.name,
                too_long,
            )
        if log and drops.broken:
            _logger.warning(
                "dataset %s: %d of %d rows left out", source.name, drops.broken, drops.seen
            )


def _named(row: Row, sign: str, times: int) -> Row:
    """Returns the row under the name that it has where it came `times` times before."""
    return {**row, "prompt_id": f"{row['prompt_id']}{sign}{times}"} if times else row


def drawn_sources(flags: DataFlags, epoch: int = 0) -> Iterator[int]:
    """Yields which source each next row comes from, without an end."""
    import numpy as np

    shares = list(flags.interleave_prob or ())
    rng = np.random.default_rng(flags.seed if not epoch else (flags.seed, epoch))
    while True:
        yield from rng.choice(len(shares), size=1000, p=shares).tolist()


def mixed_counts(sizes: Sequence[int], flags: DataFlags) -> list[int]:
    """Returns how many rows of sources of these sizes a mixed pass has."""
    counts = [0] * len(sizes)
    used_up = 0
    for number in drawn_sources(flags):
        counts[number] += 1
        used_up += counts[number] == sizes[number]
        if used_up == _ending(flags):
            break
    return counts


def _ending(flags: DataFlags) -> int:
    """Returns how many sources are used up where a mixed pass ends."""
    return 1 if flags.stopping_strategy == "first_exhausted" else len(flags.dataset)


def shuffled(rows: Iterable[Row], first: int, size: int, seed: str) -> Iterator[Row]:
    """Yields the rows in an order that the seed gives: each is drawn from a buffer, which grows to `size` as rows
    leave.

    The first `first` rows to leave are the first `first` to come, so that nothing waits for more.
    """
    rng = random.Random(seed)
    coming = iter(rows)
    buffer: list[Row] = []
    read = 0
    for drawn in count():
        wanted = first if drawn < first else drawn + min(size, drawn)
        while read < wanted and (row := next(coming, None)) is not None:
            buffer.append(row)
            read += 1
        if not buffer:
            return
        place = rng.randrange(len(buffer))
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


def chained(digest: str, row: Row) -> str:
    """Returns a hash of all rows so far: of the previous hash and a row."""
    text = json.dumps([digest, row["prompt_id"], placeless(row)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
