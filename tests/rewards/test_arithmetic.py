"""The arithmetic language against trees evaluated by brute force, and against hostile text."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.rewards.graders.countdown import ArithmeticFault, ExpressionValue, evaluate

Tree = int | tuple  # a number, ("-", tree), or (operator, left, right)

trees = st.recursive(
    st.integers(0, 10**6),
    lambda inner: st.one_of(
        st.tuples(st.just("-"), inner), st.tuples(st.sampled_from("+-*/"), inner, inner)
    ),
    max_leaves=12,
)


def value(tree: Tree) -> Fraction:
    if isinstance(tree, int):
        return Fraction(tree)
    if len(tree) == 2:
        return -value(tree[1])
    left, right = value(tree[1]), value(tree[2])
    return {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[
        tree[0]
    ](right)


def numbers(tree: Tree) -> tuple[int, ...]:
    return (tree,) if isinstance(tree, int) else sum((numbers(branch) for branch in tree[1:]), ())


_PRIORITY = {"+": 1, "-": 1, "*": 2, "/": 2}


def written(tree: Tree, needs: int, blank: str) -> str:
    """The tree with no parentheses but those that the priorities ask for (`needs`: the lowest priority allowed)."""
    if isinstance(tree, int):
        return str(tree)
    if len(tree) == 2:
        return f"-{blank}{written(tree[1], 3, blank)}"
    priority = _PRIORITY[tree[0]]
    left, right = written(tree[1], priority, blank), written(tree[2], priority + 1, blank)
    text = f"{left}{blank}{tree[0]}{blank}{right}"
    return f"({text})" if priority < needs else text


@settings(max_examples=400, deadline=None)
@given(trees, st.sampled_from(["", " ", "\n\t "]))
def test_agrees_with_the_tree(tree: Tree, blank: str) -> None:
    text = written(tree, 0, blank)
    try:
        expected = ExpressionValue(value(tree), numbers(tree))
    except ZeroDivisionError:
        with pytest.raises(ArithmeticFault, match="division by zero"):
            evaluate(text)
        return
    assert evaluate(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "  ",
        "1 2",
        "1+",
        "+1",
        "(1",
        "1)",
        "2(3)",
        "9**9",
        "1.5",
        "07",
        "٣",
        "1×2",
        "a",
        "1,000",
        "2^3",
        "-",
        "",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(ArithmeticFault):
        evaluate(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1-2-3", -4),
        ("8/4/2", 1),
        ("2+3*4", 14),
        ("--3", 3),
        ("2*-3", -6),
        ("-(1+2)", -3),
        ("1/3*3", 1),
        ("0", 0),
    ],
)
def test_priority_and_exactness(text: str, expected: int) -> None:
    assert evaluate(text).value == expected
