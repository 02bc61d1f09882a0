"""`--streaming true`: rows are read and preprocessed while the run trains, epoch after epoch, in an order that depends
on the data and the seed alone. So a position in it is a number, and going back to one is reading up to it again."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from swift_r1.data.prepare import Options
from swift_r1.data.rows import Drops, Row, preprocessed
from swift_r1.data.sources import Source
from swift_r1.errors import UsageError

_logger = logging.getLogger("swift_r1.data")


@dataclass(frozen=True)
class RowStream:
    """Rows of several sources, one source after the other, again and again.

    Attributes:
        sources: where they come from; `#N` takes the first N good rows.
        options: how they are prepared.
        seed: of the order.
        shuffle: rows leave in a random order among `buffer` rows; else as they come.
        buffer: how many rows are held at most.
        first: rows that the run begins with; no more are read before that many have left.
        fits: False for rows that are left out (too long prompts).
    """

    sources: Sequence[Source]
    options: Options
    seed: int
    shuffle: bool
    buffer: int
    first: int
    fits: Callable[[Row], bool]

    def __iter__(self) -> Iterator[Row]:
        """Rows without an end; those of a later epoch have its number in their `prompt_id`.

        Raises:
            UsageError: a source cannot be read, or no row is left; with `strict`, a row is broken.
        """
        for epoch in count():
            rows: Iterator[Row] = self._epoch(said=epoch == 0)
            if self.shuffle:
                rows = shuffled(rows, self.first, self.buffer, f"{self.seed}:{epoch}")
            found = 0
            for found, row in enumerate(rows, start=1):  # noqa: B007
                yield row if epoch == 0 else {**row, "prompt_id": f"{row['prompt_id']}@{epoch}"}
            if not found:
                raise UsageError("no training row is left; see the causes above")
            _logger.info("--streaming true: %s rows were one epoch, the next begins", f"{found:,}")

    def _epoch(self, said: bool) -> Iterator[Row]:
        for source in self.sources:
            wanted = source.spec.sample
            drops = Drops()
            too_long = 0
            left = wanted
            turn = 0
            while left is None or left > 0:
                given = 0
                for row in self._once(source, drops, said and turn == 0):
                    if not self.fits(row):
                        too_long += 1
                        continue
                    given += 1
                    yield row if not turn else {**row, "prompt_id": f"{row['prompt_id']}+{turn}"}
                    if left is not None:
                        left -= 1
                        if not left:
                            break
                if left is None or not given:
                    break
                turn += 1
                if left and said and turn == 1:
                    _logger.info("dataset %s has %d rows, repeated to make %d", source.name, given, wanted)
            if said and too_long:
                _logger.warning("dataset %s: %d prompts left out: longer than --max_length", source.name, too_long)
            if said and drops.broken:
                _logger.warning("dataset %s: %d of %d rows left out", source.name, drops.broken, drops.seen)

    def _once(self, source: Source, drops: Drops, said: bool) -> Iterator[Row]:
        raws = source.rows("train", source.spec.sample if source.samples_itself else None, self.seed)
        shown = 0
        options = self.options
        for row in preprocessed(source, raws, options.columns, drops, strict=options.strict):
            if said and len(drops.examples) > shown:
                for example in drops.examples[shown:]:
                    _logger.warning("dataset %s: a row is left out: %s", source.name, example)
                shown = len(drops.examples)
            yield row


def shuffled(rows: Iterable[Row], first: int, size: int, seed: str) -> Iterator[Row]:
    """The rows in an order that the seed gives: each is drawn from a buffer, which grows to `size` as rows leave.

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
    """A hash of all rows so far: of the hash before, and a row."""
    text = json.dumps([digest, row["prompt_id"], row], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
