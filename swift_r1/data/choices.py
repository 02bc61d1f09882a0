"""What a sampler chooses and is told (`--prompt_sampler`): checked, saved, and whatever the timing the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from numbers import Integral
from typing import Any, TypeVar

from swift_r1.data.sampler import Outcome, Sampler
from swift_r1.errors import RunFailed, describe

T = TypeVar("T")


class Choices:
    """The rows of coming prompts. Thread-safe.

    The prompts of round `n` are chosen after the sampler was told of all rounds before `n - ahead`, and of no others:
    what a round is begun with does not depend on how far the trainer is (`--async_generate`).

    Args:
        sampler: what chooses.
        ahead: rounds that may be begun before the one in training is over.
        taken: prompts that need not be taken again, the first of the run.
        saved: what `state` gave after so many; empty at the beginning.

    Its methods raise RunFailed, naming the sampler's class, where that raises or returns what it must not.
    """

    def __init__(self, sampler: Sampler, ahead: int = 0, taken: int = 0, saved: str = "") -> None:
        self._sampler = sampler
        self._ahead = ahead
        self._first = taken
        self._rows: list[int] = []  # of the prompts from number `_first` on
        self._untold: list[tuple[int, list[Outcome]]] = []  # by round
        self._lock = threading.Lock()
        if saved:
            state: Mapping[str, Any] = json.loads(saved)
            self._rows = state["rows"]
            self._untold = [
                (round_, [Outcome(**one) for one in group]) for round_, group in state["untold"]
            ]
            self._call("load_state_dict", lambda: sampler.load_state_dict(state["sampler"]))

    def choose(self, end: int, round_: int) -> None:
        """Chooses rows for all prompts up to number `end`, for this round."""
        with self._lock:
            missing = end - self._first - len(self._rows)
            if missing <= 0:
                return
            while self._untold and self._untold[0][0] < round_ - self._ahead:
                self._call("tell", partial(self._sampler.tell, self._untold.pop(0)[1]))
            self._rows += self._next(missing)

    def row(self, number: int) -> int:
        """Returns the row of a prompt for which one was chosen."""
        with self._lock:
            return self._rows[number - self._first]

    def hear(self, round_: int, outcomes: Sequence[Outcome]) -> None:
        """What became of a round; in the order of training."""
        with self._lock:
            self._untold.append((round_, [*outcomes]))

    def state(self, taken: int) -> str:
        """Returns all that is needed to go on after the first `taken` prompts, which are forgotten."""
        with self._lock:
            del self._rows[: taken - self._first]
            self._first = taken
            untold = [(round_, [asdict(one) for one in group]) for round_, group in self._untold]
            state = {"rows": self._rows, "untold": untold}
            return self._call(
                "state_dict",
                lambda: json.dumps(
                    state | {"sampler": self._sampler.state_dict()}, allow_nan=False
                ),
            )

    def _next(self, count: int) -> list[int]:
        found = self._call("next", lambda: list(self._sampler.next(count)))
        last = len(self._sampler.rows) - 1
        wrong = [row for row in found if not isinstance(row, Integral) or not 0 <= row <= last]
        if len(found) != count:
            raise self._fault("next", f"it returned {len(found)} rows, {count} were asked for")
        if wrong:
            raise self._fault(
                "next", f"it returned row {wrong[0]!r}, and there are rows 0 to {last}"
            )
        return [int(row) for row in found]

    def _call(self, name: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except (Exception, SystemExit) as error:
            raise self._fault(name, describe(error)) from error

    def _fault(self, name: str, text: str) -> RunFailed:
        return RunFailed(f"--prompt_sampler: {type(self._sampler).__name__}.{name} failed: {text}")
