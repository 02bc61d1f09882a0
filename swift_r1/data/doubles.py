"""Rows that contradict one another: one prompt with several answers, one id for several rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from swift_r1.data.preprocessors import RESPONSE_KEYS
from swift_r1.data.store import Rows

if TYPE_CHECKING:
    import numpy as np

ANSWERS = frozenset(RESPONSE_KEYS) - {"text", "completion", "content"}
_MOST_READ = 50_000  # prompts that several rows have
_SHOWN = 3


def contradictions(rows: Rows, answers: Collection[str] = ()) -> list[str]:
    """Returns a line for prompts that come with different answers, and one for ids that several rows of a dataset have,
    with their count and three of them. Columns in `ANSWERS` and in `answers` are answers."""
    once = rows.once()
    names = ANSWERS.union(answers)
    differing = []
    for places in _groups(once.column("key"))[:_MOST_READ]:
        first, *others = [once[place] for place in places]
        for other in others:
            name = next(
                (name for name in sorted(names) if _value(first, name) != _value(other, name)), None
            )
            if name is not None:
                differing.append(f"{first['prompt_id']} and {other['prompt_id']} ({name})")
                break
    equal = []
    for places in _groups(once.column("id"))[:_MOST_READ]:
        firsts: dict[str, str] = {}  # rows of that id, by dataset
        for name in (once[place]["prompt_id"] for place in places):
            first = firsts.setdefault(name.rpartition(":")[0], name)
            if first != name:
                equal.append(f"{first} and {name}")
                break
    return [
        *(
            [f"prompts with more than one answer: {len(differing)}, {_some(differing)}"]
            if differing
            else ()
        ),
        *([f"ids of more than one row: {len(equal)}, {_some(equal)}"] if equal else ()),
    ]


def _groups(column: np.ndarray) -> list[list[int]]:
    """Returns the places of each value that a column has several times, except 0."""
    import numpy as np

    values, counts = np.unique(column, return_counts=True)
    several = values[(counts > 1) & (values != 0)]
    groups: dict[int, list[int]] = {}
    for place in np.flatnonzero(np.isin(column, several)).tolist():
        groups.setdefault(int(column[place]), []).append(place)
    return list(groups.values())


def _value(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return value.strip() if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _some(examples: list[str]) -> str:
    return "; ".join(examples[:_SHOWN]) + ("; ..." if len(examples) > _SHOWN else "")
