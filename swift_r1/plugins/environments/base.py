"""What all kinds of environments share: their names, their rows, and how one episode of a row is played."""

from __future__ import annotations

import importlib
import os
import random
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from swift_r1.errors import UsageError
from swift_r1.plugins.agents import Agent, AgentResult
from swift_r1.plugins.environments.kinds import KINDS, kind_faults, package_faults

ENV_ROW = "env_row"
"""The column of an environment's own rows with everything that it wants to know of one."""
ENDLESS_ROWS = 1000
"""Rows of an environment without a data set, which makes an episode from a number, where `#N` does not say."""
_EVAL_SEEDS = 2**30  # held-out episodes begin with seeds of their own

Row = dict[str, Any]
Script = Callable[[random.Random], str]
"""What `swift check` answers in the model's place, where it calls no tool."""


PASSED = 1.0
"""The reward from which a task counts as solved."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What the tests of a task say without a model.

    Attributes:
        oracle: the reward of the task's own solution; None where it has none, or the tests gave none.
        empty: that of doing nothing.
        faults: why the task teaches nothing, a line each.
    """

    task: str
    oracle: float | None
    empty: float | None
    seconds: float
    faults: tuple[str, ...]


Prover = Callable[[], Proof]


class EnvironmentAgent(Agent):
    """One environment with its arguments. The class is made by `adapter`; an object of it plays one episode."""

    name: ClassVar[str]
    args: ClassVar[Mapping[str, Any]]

    @classmethod
    def prepare(cls) -> object:
        """Imports what episodes need, in the process that theirs are forked from. Raises UsageError."""

    @classmethod
    @abstractmethod
    def rows(cls, split: str, count: int | None) -> Iterator[Row]:
        """Returns the environment's own rows: `messages`, and `ENV_ROW` (JSON) with what `play` needs. `split` is train
        or eval; `count` matters to environments without a data set. Raises UsageError for bad names and arguments, and
        where no rows are held out."""

    @abstractmethod
    async def play(self, client: Any, row: Row, own: Row) -> AgentResult:
        """Plays an episode, as `Agent.run`; `own` is the row as the environment knows it."""

    async def run(self, client: Any, row: Row) -> AgentResult:
        seed_generators(str(row.get("prompt_id", "")))
        return await self.play(client, row, own_columns(row))

    @classmethod
    def scripts(cls, own: Row) -> dict[str, Script]:
        """Answers to try in `swift check`, by what they are."""
        return {"made up": lambda chance: "I do not know."}

    @classmethod
    def provers(cls) -> list[Prover]:
        """Returns what `swift check` calls, in threads, for each task that has tests and a solution of its own. Raises
        UsageError."""
        return []


def own_columns(row: Row) -> Row:
    """Returns what the environment gave for a row of `rows`; for another row its columns."""
    found: Row | None = row.get(ENV_ROW)
    if found is not None:
        return dict(found)
    ours = ("messages", "dataset", "prompt_id", "episode_id", "episode_seed")
    return {name: value for name, value in row.items() if name not in ours}


def seed_rows(text: str, split: str, count: int | None) -> Iterator[Row]:
    """Yields rows for an environment without a data set: row n says `text` and has the seed n (held out: others)."""
    first = _EVAL_SEEDS * (split == "eval")
    for number in range(first, first + (count or ENDLESS_ROWS)):
        yield {"messages": [{"role": "user", "content": text}], ENV_ROW: {"seed": number}}


def seed_of(row: Row) -> int:
    """Returns a seed for a row of a user's that has none: all episodes of a group begin alike."""
    return random.Random(str(row.get("prompt_id"))).getrandbits(31)


def seed_generators(text: str) -> None:
    """Seeds Python's and numpy's global generators: environments that draw from them have the same rows in each
    process, and begin all episodes of a group alike."""
    import numpy as np

    random.seed(text)
    np.random.seed(random.Random(text).getrandbits(32))


def adapter(spec: str, args: Mapping[str, Any]) -> type[EnvironmentAgent]:
    """Returns the agent of `--env` with `--env_args`. Imports the adapter of its kind, and not the environment yet.

    Raises UsageError for another kind, no name, or a package that is not installed.
    """
    faults = kind_faults(spec) or package_faults(spec)
    if faults:
        raise UsageError(*faults)
    kind, _, name = spec.partition(":")
    sys.path.append(os.getcwd())  # the environment may lie there; no library is replaced by it
    base = getattr(importlib.import_module(KINDS[kind].module), KINDS[kind].adapter)
    return type(
        base.__name__, (base,), {"name": name, "args": dict(args), "__module__": base.__module__}
    )
