"""The flags of `swift sweep`, which are the keys of its file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from swift_r1.flags.fields import Scope, flag, flag_specs, resumable_flag
from swift_r1.flags.parser import Command
from swift_r1.flags.world import World

AUTO = "auto"
_STOPS = Scope(lambda args: args.stop_after is not None, "without --stop_after")


def _check_parallel(value: str) -> None:
    if value != AUTO and not (value.isdecimal() and int(value)):
        raise ValueError(f"must be {AUTO} or a whole number of at least 1, not {value!r}")


def _check_object(value: str) -> None:
    try:
        known = isinstance(json.loads(value), dict)
    except ValueError:
        known = False
    if not known:
        raise ValueError(
            f"must be lists of flags, each like `{{name: small, learning_rate: 1e-6}}`, not {value!r}"
        )


@dataclass(frozen=True, kw_only=True)
class SweepArguments(Command):
    """Sweep."""

    command: ClassVar[str] = "sweep"
    of_others: ClassVar[str] = "put it under `flags:`"
    flags: dict[str, Any] = flag({}, "flags of swift rlhf that all runs share", required=True)
    grid: dict[str, Any] = flag(
        {}, "a list of values for each flag that varies; every combination is a point"
    )
    runs: list[str] = flag(
        [],
        "the points one by one, each with its own flags and perhaps a name",
        objects=True,
        check=_check_object,
        instead_of=("grid",),
    )
    seeds: list[int] = flag(
        [], "--seed of the runs of each point (default: one run of the default seed)"
    )
    output_dir: str | None = resumable_flag(
        None, "folder of the sweep, in it one per run (default: output/<name of the file>)"
    )
    parallel: str = resumable_flag(
        AUTO,
        "runs beside each other, each on GPUs, or without a GPU on cores, of its own; auto: as many as there are, and "
        "without a GPU as memory allows",
        check=_check_parallel,
    )
    metric: str = resumable_flag(
        "reward", "what points are compared by, as logging.jsonl names it; more is better"
    )
    over: int = resumable_flag(
        10, "optimizer steps at the end of which its mean is taken", at_least=1
    )
    stop_after: int | None = flag(
        None,
        "from this optimizer step on, stop points that are --stop_behind or --stop_below",
        at_least=1,
    )
    stop_behind: float | None = flag(
        None,
        "stop a point that is so much behind the best one at the same step",
        _STOPS,
        more_than=0,
    )
    stop_below: float | None = flag(None, "stop a point whose metric is below this", _STOPS)
    dry_run: bool = resumable_flag(False, "print the commands of the runs, and start none")

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from super().faults(given, world)
        if self.stop_after is not None and self.stop_behind is None and self.stop_below is None:
            yield "--stop_after needs --stop_behind or --stop_below, which say what is hopeless"
        if len(set(self.seeds)) < len(self.seeds):
            yield f"--seeds {' '.join(map(str, self.seeds))} has one twice"
        if not (self.grid or self.runs or self.seeds):
            yield "nothing varies: give --grid, --runs or --seeds"
        for name, values in self.grid.items():
            if not isinstance(values, list) or not values:
                yield f"--grid: {name} must be a list of values, not {json.dumps(values, default=str)}"

    @property
    def settings(self) -> Mapping[str, Any]:
        """Returns what makes it this sweep: where it is, how many run at once and what is compared may change."""
        specs = flag_specs(type(self))
        return {
            name: value for name, value in self.to_dict().items() if not specs[name].info.may_change
        }
