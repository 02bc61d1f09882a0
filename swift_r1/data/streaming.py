"""The rows of `--streaming true`, read while the run trains. Their order is a function of the data, seed and position
alone, so resuming is exact."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from swift_r1.data.images import images_of, placeless
from swift_r1.data.preprocessors import Row
from swift_r1.data.rows import Drops, rows_as_json
from swift_r1.data.sources import DataFlags, Source
from swift_r1.data.store import row_of
from swift_r1.errors import UsageError

if TYPE_CHECKING:
    import datasets

_logger = logging.getLogger("swift_r1.data")


@dataclass(frozen=True)
class RowStream:
    """Rows of several sources, again and again. Going back to a position is reading up to it again.

    Attributes:
        sources: where they come from; `#N` takes the first N good rows.
        flags: how they are prepared, mixed, and shuffled among `shuffle_buffer_size` rows.
        fits: False for rows that are left out (too long prompts).
    """

    sources: Sequence[Source]
    flags: DataFlags
    fits: Callable[[Row], bool]

    def __iter__(self) -> Iterator[Row]:
        """Yields rows without an end; those of a later epoch have its number in their `prompt_id`. UsageError where a
        source cannot be read, or no row is left; with `strict`, where a row is broken."""
        for epoch in count():
            found = 0
            # its `__iter__` would shuffle otherwise in a loader's process
            for batch in self._epoch(epoch).iter(batch_size=1):
                found += 1
                kept = {name: values[0] for name, values in batch.items()}
                row = row_of(kept)
                row["prompt_id"] += kept["again"] + (f"@{epoch}" if epoch else "")
                yield row
            if not found:
                raise UsageError("no training row is left; see the causes above")
            _logger.info("--streaming true: %s rows were one epoch, the next begins", f"{found:,}")

    def _epoch(self, epoch: int) -> datasets.IterableDataset:
        from datasets import concatenate_datasets, interleave_datasets

        flags = self.flags
        seed = flags.seed + epoch
        parts = [
            _as_dataset(partial(self._rows, source, epoch, count())) for source in self.sources
        ]
        if flags.interleave_prob is None:
            data = concatenate_datasets(parts)
        else:
            shares = list(flags.interleave_prob)
            data = interleave_datasets(
                parts, shares, seed, stopping_strategy=flags.stopping_strategy
            )
        if flags.dataset_shuffle:
            data = data.shuffle(seed, buffer_size=flags.shuffle_buffer_size)
        return data

    def _rows(self, source: Source, epoch: int, passes: Iterator[int]) -> Iterator[dict[str, Any]]:
        """Yields a source's rows of one epoch: all that fit, or `#N` of them, repeated where there are fewer. `passes`
        counts how often it is asked for them in a mixed epoch."""
        flags = self.flags
        passed = next(passes)
        log = not epoch and not passed
        wanted = source.spec.sample
        drops = Drops()
        too_long = found = shown = 0
        for turn in count():
            before = found
            raws = source.rows("train", wanted, flags.seed)
            for row, line in rows_as_json(source, raws, flags, drops):
                if log and turn == 0:
                    for example in drops.examples[shown:]:
                        _logger.warning("dataset %s: a row is left out: %s", source.name, example)
                    shown = len(drops.examples)
                if not self.fits(row):
                    too_long += 1
                    continue
                found += 1
                images = [image.path for image in images_of(row)]
                again = "".join(f"+{times}" for times in (turn, passed) if times)
                yield {"row": line, "images": images, "again": again}
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


def _as_dataset(generator: Callable[[], Iterator[dict[str, Any]]]) -> datasets.IterableDataset:
    """Returns rows as a data set. `IterableDataset.from_generator` would make a hash of the generator, and of a user's
    preprocessor there may be none."""
    from datasets import Features, List, Value
    from datasets.io.generator import GeneratorDatasetInputStream

    kinds = {"row": Value("string"), "images": List(Value("string")), "again": Value("string")}
    return GeneratorDatasetInputStream(
        generator, features=Features(kinds), streaming=True, fingerprint="stream"
    ).read()


def chained(digest: str, row: Row) -> str:
    """Returns a hash of all rows so far: of the previous hash and a row."""
    text = json.dumps([digest, row["prompt_id"], placeless(row)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
