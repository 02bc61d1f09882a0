"""Tries a sampler before a run: what it chooses, what it says to what it is told, and whether it can be resumed."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from swift_r1.data.choices import Choices
from swift_r1.data.preprocessors import Row
from swift_r1.data.sampler import Outcome, build_sampler
from swift_r1.errors import RunFailed, UsageError
from swift_r1.flags.run import RunFlags
from swift_r1.runtime.processes import handlers_kept

_ROWS = 1000
_ROUNDS = 6
_PROMPTS = 8
_SECONDS = 60.0


def sampler_faults(args: RunFlags, rows: Sequence[Row]) -> list[str]:
    """Says why `--prompt_sampler` cannot work on these rows, of which it gets the first 1000: it fails, does not
    return, or is another one when it is resumed in the middle of some rounds with made-up outcomes. In the main thread
    alone."""
    if args.streaming or args.prompt_sampler == "uniform":
        return []
    rows = rows[:_ROWS]
    try:
        with _deadline():
            return _faults(args, rows, min(_PROMPTS, len(rows)))
    except (UsageError, RunFailed) as error:
        return str(error).splitlines()


def _faults(args: RunFlags, rows: Sequence[Row], count: int) -> list[str]:
    whole = Choices(build_sampler(args.prompt_sampler, rows, args))
    expected = [_round(whole, number, count) for number in range(_ROUNDS)]
    again = Choices(build_sampler(args.prompt_sampler, rows, args))
    for number in range(_ROUNDS):
        if number == _ROUNDS // 2:
            taken = number * count
            again = Choices(
                build_sampler(args.prompt_sampler, rows, args), 0, taken, again.state(taken)
            )
        if _round(again, number, count) != expected[number]:
            return [
                f"--prompt_sampler {args.prompt_sampler} chooses other rows when it is run again or resumed: "
                "state_dict must have all that next depends on, as JSON (which makes texts of the keys of dicts), "
                "and chance must come from random.Random(seed)"
            ]
    return []


@contextmanager
def _deadline() -> Iterator[None]:
    def over(number: int, frame: FrameType | None) -> None:
        raise UsageError(f"no answer for {_SECONDS:g} s")

    with handlers_kept(signal.SIGALRM):
        signal.signal(signal.SIGALRM, over)
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _round(choices: Choices, number: int, count: int) -> list[int]:
    """Returns the rows that it chooses for a round, whose outcomes it is then told."""
    first = number * count
    choices.choose(first + count, number)
    rows = [choices.row(place) for place in range(first, first + count)]
    rates = [(row * 7 + number) % 9 / 8 for row in rows]
    outcomes = [
        Outcome(row, number + 1, rate, rate, has_signal=0 < rate < 1, gradient_share=1 / count)
        for row, rate in zip(rows, rates, strict=True)
    ]
    choices.hear(number, outcomes)
    return rows
