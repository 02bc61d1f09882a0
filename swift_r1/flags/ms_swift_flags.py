"""What a flag of ms-swift means that is no field of an argument class here; `ms_swift_flags.toml` lists them.

A flag of ms-swift has one of three meanings: it acts (it is a field), it is always so here, or it is refused with a
reason and a way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a flag means that is no field of an argument class.

    Attributes:
        reason: why it is so here, and what to do instead of another value.
        so: the values that are so here and are accepted, as written on a command line; none: always refused.
    """

    reason: str
    so: tuple[str, ...] = ()

    def accepts(self, words: Sequence[str]) -> bool:
        """Says whether the value is the one that is so here. No words are `true`, as for every switch."""
        return "*" in self.so or _plain(" ".join(words) or "true") in map(_plain, self.so)

    def fault(self, shown: str, words: Sequence[str]) -> str:
        """Returns the line about a value that is not accepted of the flag `shown`."""
        if not self.so:
            return f"{shown}: {self.reason}"
        return f"{shown} must be {' or '.join(self.so)}, not {' '.join(words) or 'true'!r}: {self.reason}"


def _plain(value: str) -> object:
    """Returns a value without differences of spelling: numbers and JSON by what they say, words by their letters."""
    value = value.strip().lower()
    with suppress(ValueError):
        return float(value)
    with suppress(ValueError):
        return json.dumps(json.loads(value), sort_keys=True)
    return value


@cache
def meanings() -> Mapping[str, Meaning]:
    """Reads, by name, the flags of ms-swift that are no fields of `swift rlhf` or of `swift rollout`."""
    import tomllib  # only where a flag is not ours

    table: dict[str, str] = tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    )
    by_name: dict[str, Meaning] = {}
    for reason, entries in table.items():
        for entry in entries.split():
            name, equals, values = entry.partition("=")
            by_name[name] = Meaning(reason, tuple(values.split("|")) if equals else ())
    return by_name
