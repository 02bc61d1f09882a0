"""Which rows: those of `#N`, and those that are held out."""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swift_r1.data.view import Rows

if TYPE_CHECKING:
    import numpy as np

_logger = logging.getLogger("swift_r1.data")


class Sampler:
    """Chooses the rows of `#N` as ms-swift does, dataset after dataset: with its default seed, the same rows.

    Args:
        seed: of the choice.
        shuffle: False takes rows in their order.
    """

    def __init__(self, seed: int, shuffle: bool) -> None:
        self._seed, self._shuffle = seed, shuffle
        self._state: np.random.RandomState | None = None
        self._skipped = 0

    def next_dataset(self) -> None:
        """ms-swift draws a number for something else before it comes to a dataset's rows."""
        self._skipped += 1

    def places(self, count: int, wanted: int) -> Sequence[int]:
        """`wanted` places among `count` rows: all of them as often as they go into it, and a choice for the rest.

        A place plus `n * count` stands for its `n`th repetition.
        """
        turns, rest = divmod(wanted, count)
        chosen = array("Q", range(turns * count))
        last: Sequence[int] = range(rest)
        if self._shuffle and rest:
            import numpy as np

            if self._state is None:
                self._state = np.random.RandomState(self._seed % 2**32)
            for _ in range(self._skipped):
                self._state.randint(0, 2**31 - 1)
            self._skipped = 0
            last = self._state.permutation(count)[:rest].tolist()
        chosen.extend(turns * count + place for place in last)
        return chosen


def take_out(rows: Rows, count: int, seed: int) -> tuple[Rows, Rows]:
    """Splits rows into (kept, taken out): `count` different prompts, never more than half of them.

    Rows with the same messages always end up on the same side, so no prompt is in both.
    """
    keys = list(rows.keys())
    first: dict[int, int] = {}
    for place, key in enumerate(keys):
        first.setdefault(key, place)
    most = len(first) // 2
    if count > most:
        _logger.warning("only %d of %d different prompts are held out: %d were asked for", most, len(first), count)
    different = list(first)
    chosen = {different[place] for place in choice(len(different), min(count, most), f"{seed}:held out")}
    kept = rows.chosen(place for place, key in enumerate(keys) if key not in chosen)
    return kept, rows.chosen(place for key, place in first.items() if key in chosen)


def choice(among: int, count: int, seed: str) -> list[int]:
    """`count` places, in their order."""
    return sorted(random.Random(seed).sample(range(among), count))


def shares(total: int, parts: int) -> list[int]:
    """A total in so many parts that differ by one at most."""
    return [total // parts + (number < total % parts) for number in range(parts)]
