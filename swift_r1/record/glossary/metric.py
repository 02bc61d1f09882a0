"""What one metric is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_ANY = {"<n>": "[0-9]+", "<k>": "[0-9]+", "<estimate>": "(avg|pass|maj)@[0-9]+"}


@dataclass(frozen=True)
class Metric:
    """One key of `logging.jsonl`, or a family of them.

    Attributes:
        name: the key; `<name>` in it stands for any text, `<n>` and `<k>` for a number.
        meaning: what it is, in one sentence.
        unit: of its values; empty for a plain number.
        healthy: what a good run shows, and what another value says; empty where there is nothing to say.
        when: what logs it; empty: every run.
    """

    name: str
    meaning: str
    unit: str = ""
    healthy: str = ""
    when: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the keys that it describes."""
        parts = re.split(r"(<[a-z]+>)", self.name)
        return re.compile(
            "".join(_ANY.get(part, ".+") if part[:1] == "<" else re.escape(part) for part in parts)
        )
