"""Which completion is to blame where a call of a reward function failed.

1. Each group of a failed call is called alone, so that one bad group costs no other;
2. the completions of a failing group are called one by one, only to learn which are to blame;
3. the group is called again, whole, with those to blame replaced by a copy of a completion that is not.

So the values that count always come from a call with a whole group: a reward that compares the completions of a group
stays right, and one that returns a wrong number of values is caught instead of repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from swift_r1.rewards.calls import Answer, Call, settled, single, without
from swift_r1.rewards.worker import Item, Outcome

Key = tuple[str, int]
"""A reward's name and a group's number."""

Run = Callable[[Sequence[Call]], Iterator[Answer]]


def isolated(first: Iterable[Answer], groups: Sequence[Item], run: Run) -> dict[Key, Outcome]:
    """The outcome of each group from each function.

    Args:
        first: answers to calls whose keys are the numbers of their groups.
        groups: all groups, by number.
        run: makes further calls; each gets an answer, in any order.
    """
    results: dict[Key, Outcome] = {}
    failed: list[Key] = []
    for answer in first:
        alone = len(answer.outcomes) == 1
        for group, outcome in zip(answer.call.key, answer.outcomes, strict=True):
            results[answer.call.name, group] = outcome
            if outcome.failure is not None and outcome.isolate and not alone:
                failed.append((answer.call.name, group))
    for answer in run([Call(key, key[0], (groups[key[1]],)) for key in failed]):
        results[answer.call.key] = answer.outcomes[0]

    failed = [key for key, outcome in results.items() if outcome.failure is not None and outcome.isolate]
    probes = [
        Call((key, index), key[0], (single(groups[key[1]], index),))
        for key in failed
        for index in range(len(groups[key[1]].completions))
    ]
    blamed: dict[Key, dict[int, Outcome]] = {key: {} for key in failed}
    for answer in run(probes):
        key, index = answer.call.key
        if answer.outcomes[0].failure is not None:
            blamed[key][index] = answer.outcomes[0]

    again = [
        Call(key, key[0], (without(groups[key[1]], causes),))
        for key, causes in blamed.items()
        # With none to blame it may have been the worker, and the group gets its chance.
        if len(causes) < len(groups[key[1]].completions)
    ]
    final = {answer.call.key: answer.outcomes[0] for answer in run(again)}
    for key, causes in blamed.items():
        results[key] = settled(final.get(key, results[key]), causes, len(groups[key[1]].completions))
    return results
