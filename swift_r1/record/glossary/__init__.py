"""Every metric that a run logs, with its meaning: docs/metrics.md is made of it, `swift view` shows it, and tests hold
what runs log against it. A new metric gets an entry here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from swift_r1.record.glossary.completions import AGENTS, COMPLETIONS, TURNS
from swift_r1.record.glossary.learning import CRITIC, POLICY, REWARDS, TEACHER
from swift_r1.record.glossary.machine import EVALUATION, ROLLOUTS, TIME
from swift_r1.record.glossary.metric import Metric

GROUPS: Mapping[str, Sequence[Metric]] = {
    "Rewards": REWARDS,
    "Policy and loss": POLICY,
    "Critic": CRITIC,
    "Teachers and experts": TEACHER,
    "Completions": COMPLETIONS,
    "Turns and tools": TURNS,
    "Agents": AGENTS,
    "Rollouts and weights": ROLLOUTS,
    "Time and memory": TIME,
    "Evaluation": EVALUATION,
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


__all__ = ["GROUPS", "Metric", "metric", "unknown"]
