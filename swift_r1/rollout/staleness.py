"""How old the weights were that wrote what is trained on, counted in rounds of training.

Version numbers do not tell: a server counts them over all runs, and a repair pushes the same weights under another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swift_r1.rollout.trajectory import TokenSequence


class ServedVersions:
    """Keeps the rounds of training behind each weight version that this run has pushed. Thread-safe.

    Attributes:
        rounds: of the weights that are pushed next; a round that is not over does not count.
        current: numbers of the newest weights, several where a server that came back had a higher number already. At
            first the highest number that a server has.
    """

    def __init__(self, first: int = 0) -> None:
        self.rounds = 0
        self.current = {first}
        self._rounds_of: dict[int, int] = {}

    def pushing(self, version: int, again: bool = False) -> None:
        """Notes a `version` before a server can answer with it; `again`: of the weights that were pushed last."""
        if again:
            self._rounds_of[version] = self._rounds_of[min(self.current)]
            self.current.add(version)
        else:
            self._rounds_of[version] = self.rounds
            self.current = {version}

    def rounds_of(self, version: int) -> int:
        return self._rounds_of[version]

    def __contains__(self, version: object) -> bool:
        return version in self._rounds_of


def oldest_rounds(versions: Iterable[int], served: ServedVersions) -> int:
    """Returns the rounds behind the oldest weights of these versions."""
    return min(map(served.rounds_of, versions))


def staleness_metrics(
    sequences: Sequence[TokenSequence], trained: int, served: ServedVersions
) -> dict[str, float]:
    """Returns `rollout/staleness/mean` over tokens and `rollout/staleness/max`, against weights with `trained` rounds
    behind."""
    ages = [
        trained - served.rounds_of(version)
        for sequence in sequences
        for version in sequence.versions_of_tokens()
    ]
    oldest = oldest_rounds((sequence.oldest_version for sequence in sequences), served)
    return {
        "rollout/staleness/mean": sum(ages) / len(ages) if ages else 0.0,
        "rollout/staleness/max": float(trained - oldest),
    }
