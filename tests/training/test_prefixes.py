"""A tree of rows: each token stands once, and each row is a way through it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.training import prefixes
from swift_r1.training.micro_batches import SHARED, RowLengths, plan_micro_batches
from swift_r1.training.prefixes import RowTokens, in_order, tree_of

Tokens = list[int]


@pytest.fixture(autouse=True)
def _each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST", 1)


def rows_of(tokens: Sequence[Tokens]) -> list[RowTokens]:
    return [RowTokens(np.array(one), 1, number) for number, one in enumerate(tokens)]


def ways(tokens: Sequence[Tokens]) -> tuple[list[Tokens], int]:
    """The tokens along each row's way through the tree, by number, and the tokens of all segments."""
    ordered = in_order(rows_of(tokens))
    assert sorted(ordered.rows) == list(range(len(tokens)))
    tree = tree_of(ordered, [len(one) for one in tokens])
    of_segments = [
        tokens[row][begin : begin + one.length]
        for one, (row, begin) in zip(tree.segments, tree.origins, strict=True)
    ]
    for number, one in enumerate(tree.segments):
        # depth first: behind its parent, or behind what stands below that
        assert one.length and one.parent < number
        assert number == 0 or one.parent in (-1, *above(tree, number - 1))
    found: dict[int, Tokens] = {}
    for row, path in zip(ordered.rows, tree.paths, strict=True):
        assert [tree.segments[one].parent for one in path] == [-1, *path[:-1]]
        found[row] = [token for one in path for token in of_segments[one]]
    return [found[row] for row in range(len(tokens))], sum(map(len, of_segments))


def above(tree: prefixes.PrefixTree, number: int) -> list[int]:
    way = [number]
    while tree.segments[way[-1]].parent >= 0:
        way.append(tree.segments[way[-1]].parent)
    return way


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=9))
def test_each_beginning_stands_once(tokens: list[Tokens]) -> None:
    found, stored = ways(tokens)
    assert found == tokens
    assert stored == len({tuple(one[:end]) for one in tokens for end in range(1, len(one) + 1)})


def test_a_segment_saves_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an equal prompt from its end on, else from the start."""
    monkeypatch.setattr(prefixes, "LEAST", 4)
    tokens = np.arange(20)
    other = tokens.copy()
    other[11:] += 50
    for kinds, common in (((7, 7), 3 + 8), ((7, 8), 8)):
        rows = [RowTokens(one, 3, kind) for one, kind in zip((tokens, other), kinds, strict=True)]
        assert in_order(rows).common == (0, common)
    for images, common in (((True, True), 0), ((False, True), 0)):
        rows = [RowTokens(tokens, 3, kind, one) for kind, one in enumerate(images)]
        assert in_order(rows).common == (0, common)
    same = [RowTokens(tokens, 3, 5, images=True), RowTokens(other, 3, 5, images=True)]
    assert in_order(same).common == (0, 11)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(9, 40),
)
def test_groups_of_any_size_are_dealt_within_the_budget(
    tokens: list[Tokens], world: int, budget: int
) -> None:
    ordered = in_order(rows_of(tokens))
    places = [ordered.rows.index(row) for row in range(len(tokens))]
    common = [ordered.common[place] for place in places]
    groups = [sum(one == 0 for one in ordered.common[: place + 1]) for place in places]
    lengths = RowLengths(
        [1] * len(tokens), [len(one) - 1 for one in tokens], groups, (), places, common
    )
    plan = plan_micro_batches(lengths, SHARED, world, budget)
    units = [unit for rank in plan for micro in rank for unit in micro]
    assert sorted(row for unit in units for row in unit) == list(range(len(tokens)))
    for unit in units:
        computed = len(
            {tuple(tokens[row][:end]) for row in unit for end in range(1, len(tokens[row]) + 1)}
        )
        assert SHARED.tokens(unit, lengths) == computed
    for micro in (micro for rank in plan for micro in rank):
        assert SHARED.cost(micro, lengths) <= budget
