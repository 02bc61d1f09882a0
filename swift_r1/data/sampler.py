"""Which rows are trained on next: the samplers of `--prompt_sampler`, and what a plugin's own derives from.

A sampler is a function of the data, its seed and what it has been told, so that a resumed run chooses the same rows.
"""

from __future__ import annotations

import hashlib
import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from swift_r1.data.preprocessors import Row
from swift_r1.errors import UsageError, a_kind, describe, no_such

if TYPE_CHECKING:
    import numpy as np


class PromptSampler:
    """An endless, deterministic sequence of rounds of row indices.

    Epochs follow each other without a gap: every row comes once per epoch, each epoch in a new permutation made from
    (seed, epoch) alone, and a round at an epoch's end takes its last prompts from the next epoch.

    Args:
        num_rows: rows of the training set, > 0.
        prompts_per_round: prompts per round over all ranks, > 0.
        shuffle: False gives the rows in file order every epoch.
        seed: of the permutations.
        drop_last: an epoch ends with its last whole round; the rows that are left out are others each time.
    """

    def __init__(
        self,
        num_rows: int,
        prompts_per_round: int,
        shuffle: bool = True,
        seed: int = 42,
        drop_last: bool = False,
    ) -> None:
        if num_rows <= 0 or prompts_per_round <= 0:
            raise ValueError(
                f"a sampler needs rows and prompts, got {num_rows} and {prompts_per_round}"
            )
        self.rows_per_epoch = num_rows - num_rows % prompts_per_round if drop_last else num_rows
        self.num_rows = num_rows
        self.prompts_per_round = prompts_per_round
        self.shuffle = shuffle
        self.seed = seed
        self._drawn = 0
        self._order: np.ndarray | None = None
        self._order_epoch = -1

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        """Returns the row indices of the next round, `prompts_per_round` of them."""
        return self.draws(self.prompts_per_round)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and what it is a position in: a few numbers, whatever the size of the data."""
        return {
            "drawn": self._drawn,
            "num_rows": self.num_rows,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; UsageError where it is one in other data, another seed or another order."""
        own = self.state_dict()
        differing = [key for key in ("num_rows", "shuffle", "seed") if state[key] != own[key]]
        if differing:
            faults = ", ".join(f"{key} {state[key]} became {own[key]}" for key in differing)
            raise UsageError(
                f"cannot resume the order of the data: {faults}; give the flags of the saved run"
            )
        self._drawn = int(state["drawn"])

    def draws(self, count: int) -> list[int]:
        """Returns the next `count` row indices."""
        return [self.draw() for _ in range(count)]

    def draw(self) -> int:
        """Returns the next row index."""
        epoch, position = divmod(self._drawn, self.rows_per_epoch)
        if self.shuffle and epoch != self._order_epoch:
            self._order = permutation(self.num_rows, f"{self.seed}:{epoch}")
            self._order_epoch = epoch
        self._drawn += 1
        return position if self._order is None else int(self._order[position])


def permutation(count: int, seed: str) -> np.ndarray:
    """int64 `[count]`, the same with every version of numpy. Another one needs another `_FORMAT` of checkpoints
    (`training/checkpoint/state.py`), so that none is resumed in it."""
    import numpy as np

    digest = hashlib.blake2b(seed.encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4").astype(np.uint32)).permutation(count)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one group: all completions of a row in one round."""

    row: int  # its number
    step: int  # the first optimizer step on the round, as in `completions.jsonl`
    reward: float | None  # mean of the valid rewards; None without one
    pass_rate: float  # share of the completions that the first reward function gives 1 or more
    has_signal: bool  # its valid rewards are not all equal
    # its share of the sum of the absolute advantages of its round; 0 where another group has replaced it
    # (`--dynamic_sample`)
    gradient_share: float


class Sampler(ABC):
    """Chooses the rows that are trained on next. One that learns from what became of the rows that it chose overrides
    `tell`, `state_dict` and `load_state_dict`.

    Attributes:
        rows: the training rows (dicts), by number from 0; of a large data set each is read when it is asked for.
        args: the run's flags.
        order: every row once per epoch, in the order of `--prompt_sampler uniform` (`order.draw()`).
    """

    def __init__(self, rows: Sequence[Row], args: Any) -> None:
        self.rows = rows
        self.args = args
        self.order = PromptSampler(len(rows), 1, args.dataset_shuffle, int(args.data_seed or 0))

    @abstractmethod
    def next(self, count: int) -> Sequence[int]:
        """Returns the numbers of the next `count` rows; a row may come several times."""

    def tell(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027  most samplers learn nothing
        """Called with all groups of a round, in the order of training, each once."""

    def state_dict(self) -> dict[str, Any]:
        """Returns all that `next` depends on, of values that JSON has: dicts with text as keys, lists, texts,
        numbers."""
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to what `state_dict` gave, in a new object for the same rows."""
        self.order.load_state_dict(state["order"])


class Uniform(Sampler):
    """Every row once per epoch, in a new random order each."""

    def next(self, count: int) -> list[int]:
        return self.order.draws(count)


class Difficulty(Sampler):
    """Rows whose pass rate was nearest to one half, and new rows in between."""

    known = 0.75  # of a round at most
    between = 0.1, 0.9  # pass rates of a known row that comes again before its turn
    rest = 4  # calls of `next` in between

    def __init__(self, rows: Sequence[Row], args: Any) -> None:
        super().__init__(rows, args)
        self._calls = 0
        # by row: the call that chose it last; of those in `_rates` or not rested
        self._last: dict[int, int] = {}
        # by row: its pass rate if `between`, where it was told of since then
        self._rates: dict[int, float] = {}

    def next(self, count: int) -> list[int]:
        self._calls += 1
        self._last = {
            row: at for row, at in self._last.items() if row in self._rates or not self._rested(row)
        }
        fit = [row for row in self._rates if self._rested(row)]
        most = int(count * self.known)
        rows = heapq.nsmallest(
            most, fit, key=lambda row: (abs(self._rates[row] - 0.5), self._last.get(row, 0))
        )
        others = (self.order.draw() for _ in range(len(self.rows)))
        taken = set(rows)
        rows += islice(
            (row for row in others if row not in taken and self._rested(row)), count - len(rows)
        )
        rows += self.order.draws(count - len(rows))  # all others have come of late
        for row in rows:
            self._last[row] = self._calls
            self._rates.pop(row, None)
        return rows

    def _rested(self, row: int) -> bool:
        return self._calls - self._last.get(row, -self.rest) > self.rest

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        low, high = self.between
        self._rates.update(
            (one.row, one.pass_rate) for one in outcomes if low <= one.pass_rate <= high
        )

    def state_dict(self) -> dict[str, Any]:
        own = {"calls": self._calls, "last": [*self._last.items()], "rates": [*self._rates.items()]}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._calls = state["calls"]
        self._last = dict(state["last"])
        self._rates = dict(state["rates"])


samplers: dict[str, Callable[[Sequence[Row], Any], Sampler]] = {
    "uniform": Uniform,
    "difficulty": Difficulty,
}
"""Name for `--prompt_sampler` -> class. Plugins write into it."""


def build_sampler(name: str, rows: Sequence[Row], args: Any) -> Sampler:
    """Constructs the sampler registered as `name`. Raises UsageError: unknown name, or its construction fails."""
    flag = f"--prompt_sampler {name}"
    if name not in samplers:
        raise UsageError(f"--prompt_sampler: {no_such('sampler', name, sorted(samplers))}")
    try:
        sampler = samplers[name](rows, args)
    except UsageError as error:
        raise UsageError(*(f"{flag}: {fault}" for fault in error.faults)) from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{flag} cannot be constructed: {describe(error)}") from error
    if not isinstance(sampler, Sampler):
        raise UsageError(
            f"{flag} is {a_kind(sampler)}, which does not derive from swift_r1.Sampler"
        )
    if not hasattr(sampler, "order"):
        raise UsageError(
            f"{flag}: {type(sampler).__name__}.__init__ must call super().__init__(rows, args)"
        )
    return sampler
