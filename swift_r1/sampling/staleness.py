"""How old the weights were that wrote what is trained on, counted in rounds of training.

A server counts versions by itself, over all runs, and a repair or a restart pushes the same weights under another
number. What is bounded (`--max_staleness`) and logged is therefore how many rounds the weights were trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swift_r1.wire.protocol import Completion


class ServedVersions:
    """For each weight version that this run has pushed, the rounds of training behind it. For several threads.

    `version in served` says whether this run has pushed it.

    Attributes:
        rounds: of the weights that are pushed next; a round that is not over does not count.
        current: numbers of the newest weights: a server that comes back ahead of the others, as one that another run
            has used, gets them under a number above its own. At first the highest number that a server has.
    """

    def __init__(self, first: int = 0) -> None:
        self.rounds = 0
        self.current = {first}
        self._rounds_of: dict[int, int] = {}

    def pushing(self, version: int, again: bool = False) -> None:
        """To be called before a server can answer with `version`; `again`: of the weights that were pushed last."""
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
    ages, tokens = 0, 0
    for one in completions:
        for length, version in _spans(one):
            ages += length * (trained - served.rounds_of(version))
            tokens += length
    return {
        "rollout/staleness/mean": ages / tokens if tokens else 0.0,
        "rollout/staleness/max": float(trained - oldest_rounds(completions, served)),
    }


def _spans(one: Completion) -> Iterator[tuple[int, int]]:
    """Length and version of each stretch of tokens."""
    starts = one.weight_versions or ((0, one.weight_version),)
    ends = [start for start, _ in starts[1:]] + [len(one.token_ids)]
    for (start, version), end in zip(starts, ends, strict=True):
        yield end - start, version
