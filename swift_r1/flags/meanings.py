"""What a flag of ms-swift means that is no field of an argument class here.

A flag of ms-swift has one of three meanings: it acts (it is a field), it is always so here, or it is refused with a
reason and a way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from swift_r1.flags.ms_swift_flags import TABLE


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
        """Whether the value is the one that is so here. No words are `true`, as for every switch."""
        return "*" in self.so or _plain(" ".join(words) or "true") in map(_plain, self.so)

    def fault(self, shown: str, words: Sequence[str]) -> str:
        """The line about a value that is not accepted of the flag `shown`."""
        if not self.so:
            return f"{shown}: {self.reason}"
        return f"{shown} must be {' or '.join(self.so)}, not {' '.join(words) or 'true'!r}: {self.reason}"


def _plain(value: str) -> object:
    """A value without differences of spelling: numbers and JSON by what they say, words by their letters."""
    value = value.strip().lower()
    with suppress(ValueError):
        return float(value)
    with suppress(ValueError):
        return json.dumps(json.loads(value), sort_keys=True)
    return value


def _meanings() -> dict[str, Meaning]:
    found: dict[str, Meaning] = {}
    for reason, entries in TABLE.items():
        for entry in entries.split():
            name, equals, values = entry.partition("=")
            found[name] = Meaning(reason, tuple(values.split("|")) if equals else ())
    return found


MEANINGS = _meanings()
"""By name, the flags of ms-swift that are no fields of `swift rlhf` or of `swift rollout`."""
