"""A completion's program, the tests of a row of a public code set, and what passes them. Nothing is run here.

`cases_of` reads ms-swift's and open-r1's `verification_info`, the `input_output` of APPS and TACO, and the test cases
of LiveCodeBench.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_r1.errors import a_kind

_NAMES = ("python", "python3", "py")
_BLOCK = re.compile(rf"```(?:{'|'.join(_NAMES)})[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_SCRIPT = ("stdin_stdout", "stdin")
_FUNCTION = ("function_call", "functional")
_TOLERANCE = 1e-6  # of numbers with a point that a function returns, relative or absolute


@dataclass(frozen=True, slots=True)
class Case:
    """One test. With `fn_name`, the function is called with `args` and must return one of the `right` JSON values;
    without, the program reads `stdin` and must print the `right` text."""

    right: tuple[Any, ...]
    stdin: str = ""
    fn_name: str | None = None
    args: tuple[Any, ...] = ()


def program_of(completion: str) -> str:
    """Returns the last closed block, fenced by three backquotes and labelled python, python3 or py; empty without
    one."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else ""


def cases_of(tests: Any) -> list[Case]:
    """Returns the tests of a row: an object, its JSON, or a list of test cases. Raises ValueError: what is wrong with
    them."""
    tests = _read(tests)
    if isinstance(tests, list):
        tests = {"test_cases": tests}

    if not isinstance(tests, Mapping):
        raise ValueError(
            f"the tests of a row are {a_kind(tests)}, not an object or a list of test cases"
        )
    if str(tests.get("language") or "python").lower() not in _NAMES:
        raise ValueError(f"the tests are for {tests['language']}, and the sandbox has only Python")

    cases = _read(tests.get("test_cases"))
    inputs = tests.get("inputs")
    outputs = tests.get("outputs")
    if cases is None and isinstance(inputs, list) and isinstance(outputs, list):
        if len(inputs) != len(outputs):
            raise ValueError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
        cases = [
            {"input": given, "output": right} for given, right in zip(inputs, outputs, strict=True)
        ]

    if not isinstance(cases, Sequence) or not cases:
        raise ValueError(
            "a row has no tests: test_cases, or inputs and outputs, are missing or empty"
        )
    return [_case(case, tests.get("fn_name")) for case in cases]


def _read(value: Any) -> Any:
    """Returns what a text holds as JSON, and any other value as it is. Raises ValueError: the text is no JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"the tests of a row are not JSON: {error}") from error


def _case(case: Any, fn_name: str | None) -> Case:
    """Returns a test case of a row; `fn_name` is the function of all that name none. Raises ValueError."""
    if not isinstance(case, Mapping) or "input" not in case or "output" not in case:
        raise ValueError("a test case is an object with input and output")
    given = case["input"]
    right = case["output"]
    name = case.get("fn_name") or fn_name
    kind = case.get("type") or case.get("testtype") or (_FUNCTION if name else _SCRIPT)[0]
    if kind in _SCRIPT:
        return Case((_text(right),), stdin=_text(given))

    if kind not in _FUNCTION or not name:
        raise ValueError(
            f"a test case of type {kind} needs fn_name"
            if kind in _FUNCTION
            else f"unknown type {kind}"
        )
    if isinstance(given, str):  # LiveCodeBench: JSON, a line for each argument
        lines = [line for line in given.split("\n") if line.strip()]
        return Case((_read(right),), fn_name=name, args=tuple(map(_read, lines)))

    if not isinstance(given, list):
        raise ValueError(f"the input of {name} is not a list of arguments")

    # APPS puts what a function returns into a list of one, but not always.
    unpacked = right if isinstance(right, list) and len(right) == 1 else []
    return Case((right, *unpacked), fn_name=name, args=tuple(given))


def _text(value: Any) -> str:
    """Returns what a program reads or prints; a list has a line for each item."""
    if value is None:
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def passes(case: Case, output: bytes) -> bool:
    """Returns whether what a program printed, or the JSON of what its function returned, is right. Blanks at both ends
    of the text and at the ends of its lines do not count."""
    if case.fn_name is None:
        return _lines(output.decode("utf-8", "replace")) == _lines(case.right[0])
    try:
        value = json.loads(output)
        return any(_same(value, right) for right in case.right)
    except (ValueError, RecursionError, OverflowError):  # no JSON, too deep, too large for a float
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def _same(value: Any, right: Any) -> bool:
    """Says whether two JSON values are the same; numbers with a point are where they are close."""
    if isinstance(value, list) and isinstance(right, list):
        return len(value) == len(right) and all(map(_same, value, right))
    if isinstance(value, dict) and isinstance(right, dict):
        return value.keys() == right.keys() and all(_same(value[key], right[key]) for key in right)
    numbers = isinstance(value, int | float) and isinstance(right, int | float)
    if numbers and isinstance(value, float) | isinstance(right, float):
        return math.isclose(value, right, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(value == right)
