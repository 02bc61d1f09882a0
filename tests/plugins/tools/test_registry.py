"""What a model is told of a plugin's functions."""

from __future__ import annotations

from datetime import date
from functools import partial
from typing import Literal

import pytest

from swift_r1.data.tool_registry import described, tools
from swift_r1.errors import UsageError


def plain(x: int, y: float = 1.0, *, mode: Literal["p", "q"] = "p") -> float:
    """Adds
    two things."""
    return x + y


def google(x: int, y: str | None = None, many: list[str] = []) -> str:  # noqa: B006
    """Joins.

    Args:
        x: the one
        y (str, optional): the
            other

    Returns:
        str: both
    """
    return f"{x}{y}{many}"


async def nothing() -> str:
    """Says nothing.

    Returns:
        str: it
    """
    return ""


def unhinted(x):
    """Has no hint."""


def undocumented(x: int): ...


def dated(day: list[date] | None):
    """Has a hint that a model could not follow."""


def variadic(*x: int):
    """Takes any."""


@pytest.fixture
def describe(monkeypatch):
    def run(function):
        monkeypatch.setitem(tools, "named", function)
        return described("named")["function"]

    return run


def test_hints_and_a_plain_docstring_make_the_description(describe):
    assert describe(plain) == {
        "name": "named",
        "description": "Adds\ntwo things.",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "integer"},
                "y": {"type": "number"},
                "mode": {"type": "string", "enum": ["p", "q"]},
            },
            "required": ["x"],
        },
    }


def test_arguments_of_googles_form_are_described(describe):
    found = describe(google)
    assert found["description"] == "Joins."
    about = {
        name: one.get("description") for name, one in found["parameters"]["properties"].items()
    }
    assert about == {"x": "the one", "y": "the other", "many": None}


def test_a_coroutine_without_arguments(describe):
    assert describe(nothing)["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (unhinted, r"test_registry.py:\d+: the parameter x has no type hint"),
        (undocumented, r"test_registry.py:\d+: it has no docstring"),
        (
            variadic,
            r"test_registry.py:\d+: the model gives arguments by name, so there can be no \*x",
        ),
        (3, "is an int, not a function"),
        (partial(plain, 1), "is a partial, not a function"),
        (dated, "the type hint of day has date, which no JSON is"),
    ],
)
def test_what_cannot_be_described_is_refused_with_its_line(describe, function, fault):
    with pytest.raises(UsageError, match=fault):
        describe(function)
