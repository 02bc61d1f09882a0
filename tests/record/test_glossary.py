"""Metrics and their meanings."""

from __future__ import annotations

import pytest

from swift_r1.record.glossary import metric, unknown


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward", "reward"),
        ("rewards/a/b/mean", "rewards/<reward>/mean"),
        ("rewards/f/invalid", "rewards/<reward>/invalid"),
        ("rewards/f/invalid/timeout", "rewards/<reward>/invalid/<kind>"),
        ("eval/org/set/avg@4", "eval/<set>/avg@<n>"),
        ("eval/org/set/avg@4/low", "eval/<set>/<estimate>/low"),
        ("eval/mean/accuracy", "eval/<set>/accuracy"),
        ("tools/unknown_calls", "tools/unknown_calls"),
        ("tools/search/calls", "tools/<tool>/calls"),
    ],
)
def test_a_key_has_the_meaning_of_its_own_or_of_its_family(key: str, name: str) -> None:
    found = metric(key)
    assert found is not None and found.name == name


def test_a_key_without_a_meaning_is_named() -> None:
    assert unknown(["reward", "rewards", "policy_loss/new", "eval/x/avg@n", "agent/other"]) == [
        *("agent/other", "eval/x/avg@n", "policy_loss/new", "rewards"),
    ]
