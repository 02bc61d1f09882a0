"""Every metric that a run logs, with its meaning: `swift view` shows it, the site's page of metrics is made of it, and
tests hold what runs log against it. A new metric gets an entry in `glossary.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from swift_r1.algorithms.method import Distillation, Loss
from swift_r1.algorithms.methods import DISTILLATIONS, LOSSES

_ANY = {"<n>": "[0-9]+", "<k>": "[0-9]+", "<estimate>": "(avg|pass|maj)@[0-9]+"}


@dataclass(frozen=True)
class Metric:
    """One key of `logging.jsonl`, or a family of them; `glossary.toml` says what the fields are."""

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


_GLOSSARY = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_DECLARED: Mapping[str, Mapping[str, Loss | Distillation]] = {
    "Policy and loss": LOSSES,
    "Teachers and experts": DISTILLATIONS,
}


def _metrics(group: str, entries: Mapping[str, Mapping[str, str]]) -> list[Metric]:
    """Returns the metrics of a group: those of the file, and what single methods log, as their files declare it."""
    return [
        *(Metric(name, **entry) for name, entry in entries.items()),
        *(
            Metric(*logged, f"`{method.chosen_by}`")
            for method in _DECLARED.get(group, {}).values()
            for logged in method.metrics
        ),
    ]


GROUPS: Mapping[str, Sequence[Metric]] = {
    group: _metrics(group, entries) for group, entries in _GLOSSARY.items()
}


@cache
def metric(key: str) -> Metric | None:
    """Returns the meaning of a key of `logging.jsonl`: the entry of that name, else the first family that it belongs
    to."""
    everything = [one for group in GROUPS.values() for one in group]
    exact = (one for one in everything if one.name == key)
    return next(exact, None) or next(
        (one for one in everything if one.pattern.fullmatch(key)), None
    )


def unknown(keys: Iterable[str]) -> list[str]:
    """Returns the keys that have no meaning here."""
    return sorted({key for key in keys if metric(key) is None})
