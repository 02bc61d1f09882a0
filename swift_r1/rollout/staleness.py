"""How old the weights were that wrote what is trained on, counted in rounds of training.

Version numbers do not tell: a server counts them over all runs, and a repair pushes the same weights under another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_r1.wire.protocol import Completion


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


def oldest_rounds(completions: Sequence[Completion], served: ServedVersions) -> int:
    """Rounds behind the oldest weights that wrote any token of the completions."""
    return min(served.rounds_of(one.weight_version) for one in completions)


def staleness_metrics(completions: Sequence[Completion], trained: int, served: ServedVersions) -> dict[str, float]:
    """`rollout/staleness/mean` over tokens and `rollout/staleness/max`, against weights with `trained` rounds behind.

    Tokens of a completion of several versions count as its oldest where the engine does not tell which wrote which.
    """
    ages = [trained - served.rounds_of(version) for one in completions for version in versions_of_tokens(one)]
    return {
        "rollout/staleness/mean": sum(ages) / len(ages) if ages else 0.0,
        "rollout/staleness/max": float(trained - oldest_rounds(completions, served)),
    }


def versions_of_tokens(completion: Completion) -> list[int]:
    """Returns the version of the weights that wrote each token."""
    return spread(stretches(completion), len(completion.token_ids))


def stretches(completion: Completion) -> tuple[tuple[int, int], ...]:
    """`(first token, version)` of what the same weights wrote; of the oldest for all where the engine does not tell."""
    return completion.weight_versions or ((0, completion.weight_version),)


def spread(stretches: Sequence[tuple[int, int]], length: int) -> list[int]:
    """The version of each of `length` tokens."""
    versions: list[int] = []
    for start, version in reversed(stretches):
        versions = [version] * (length - len(versions) - start) + versions
    return versions


def spans_of(versions: Sequence[int | None]) -> tuple[tuple[int, int], ...]:
    """`(first token, version)` of each stretch; tokens that no weights wrote belong to the stretch before them."""
    spans: list[tuple[int, int]] = []
    for place, version in enumerate(versions):
        if version is not None and (not spans or spans[-1][1] != version):
            spans.append((place if spans else 0, version))
    return tuple(spans)
