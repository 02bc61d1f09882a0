"""The order in which prompts are trained on: a pure function of seed and position, so resuming is exact."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from swift_r1.errors import UsageError


class PromptSampler:
    """An endless, deterministic sequence of rounds of row indices.

    Epochs follow each other without a gap: every row comes once an epoch, each epoch in a new permutation made
    from (seed, epoch) alone, and a round at an epoch's end takes its last prompts from the next epoch.
    `len(sampler)` is the rounds that one epoch takes (rounded up).

    Args:
        num_rows: rows of the training set, > 0.
        prompts_per_round: prompts a round, > 0 (over all ranks).
        shuffle: False gives the rows in file order every epoch.
        seed: of the permutations.
    """

    def __init__(self, num_rows: int, prompts_per_round: int, shuffle: bool = True, seed: int = 42) -> None:
        if num_rows <= 0 or prompts_per_round <= 0:
            raise ValueError(f"a sampler needs rows and prompts, got {num_rows} and {prompts_per_round}")
        self.num_rows = num_rows
        self.prompts_per_round = prompts_per_round
        self.shuffle = shuffle
        self.seed = seed
        self._drawn = 0
        self._order: list[int] = []
        self._order_epoch = -1

    def __len__(self) -> int:
        return self.rounds(1)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        """The row indices of the next round, `prompts_per_round` of them."""
        return [self._draw() for _ in range(self.prompts_per_round)]

    def rounds(self, epochs: float) -> int:
        """Rounds that `epochs` epochs take, rounded up, at least one."""
        return max(1, math.ceil(epochs * self.num_rows / self.prompts_per_round - 1e-9))

    @property
    def epoch(self) -> float:
        """Epochs drawn so far, with the fraction of the one under way."""
        return self._drawn / self.num_rows

    def state_dict(self) -> dict[str, Any]:
        """The position and what it is a position in: a few numbers, whatever the size of the data."""
        return {
            "drawn": self._drawn,
            "num_rows": self.num_rows,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position. `prompts_per_round` may differ from the saved run's.

        Raises:
            UsageError: the state is of other data, another seed or another order.
        """
        mine = self.state_dict()
        differing = [key for key in ("num_rows", "shuffle", "seed") if state[key] != mine[key]]
        if differing:
            faults = ", ".join(f"{key} {state[key]} became {mine[key]}" for key in differing)
            raise UsageError(f"cannot resume the order of the data: {faults}; give the flags of the saved run")
        self._drawn = int(state["drawn"])

    def _draw(self) -> int:
        epoch, position = divmod(self._drawn, self.num_rows)
        if epoch != self._order_epoch:
            self._order = list(range(self.num_rows))
            if self.shuffle:
                random.Random(f"{self.seed}:{epoch}").shuffle(self._order)
            self._order_epoch = epoch
        self._drawn += 1
        return self._order[position]
