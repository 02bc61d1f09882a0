"""Programs in completions, the formats of tests, and what passes: nothing runs here."""

from __future__ import annotations

import json

import pytest

from swift_r1.rewards.graders.programs import Case, cases_of, passes, program_of


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```python\nold\n```\nbetter:\n```Python3 \r\nnew\n``` and ```\nits output\n```", "new\n"),
        ("<answer>```py\nx```</answer>", "x"),
        ("```python\nunclosed", ""),
        ("```\nnot labelled\n```", ""),
        ("```cpp\nint main() {}\n```", ""),
        ("", ""),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(completion: str, program: str) -> None:
    assert program_of(completion) == program


SCRIPT = Case(("3",), stdin="1 2")


@pytest.mark.parametrize(
    ("tests", "cases"),
    [
        ({"language": "python", "test_cases": [{"input": "1 2", "output": "3"}]}, [SCRIPT]),
        (
            json.dumps(
                {
                    "test_cases": [
                        {"input": "1 2", "output": "3", "fn_name": None, "type": "stdin_stdout"}
                    ]
                }
            ),
            [SCRIPT],
        ),
        ({"inputs": ["1 2"], "outputs": ["3"]}, [SCRIPT]),
        (
            json.dumps({"inputs": [["1", "2"]], "outputs": [["3", "4"]]}),
            [Case(("3\n4",), stdin="1\n2")],
        ),
        ([{"input": "1 2", "output": "3", "testtype": "stdin"}], [SCRIPT]),
        (
            {"inputs": [[1, [2]]], "outputs": [[3]], "fn_name": "add"},
            [Case(([3], 3), fn_name="add", args=(1, [2]))],
        ),
        (
            {
                "test_cases": [
                    {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": "ab"}
                ]
            },
            [Case(("ab",), fn_name="add", args=(1, 2))],
        ),
        (
            {"inputs": None, "outputs": None, "test_cases": [{"input": None, "output": 3}]},
            [Case(("3",))],
        ),
        (
            [
                {
                    "input": '"a\u2028b"\n\n1',
                    "output": "3",
                    "testtype": "functional",
                    "fn_name": "add",
                }
            ],
            [Case((3,), fn_name="add", args=("a\u2028b", 1))],
        ),
        (
            [{"input": '[1, 2]\n"x"', "output": "[3]", "testtype": "functional", "fn_name": "add"}],
            [Case(([3],), fn_name="add", args=([1, 2], "x"))],
        ),
    ],
)
def test_the_formats_of_public_sets_are_read(tests: object, cases: list[Case]) -> None:
    assert cases_of(tests) == cases


@pytest.mark.parametrize(
    ("tests", "fault"),
    [
        (3, "an int, not an object"),
        ("{", "not JSON"),
        ({}, "no tests"),
        ({"test_cases": []}, "no tests"),
        ({"language": "rust", "test_cases": [{}]}, "only Python"),
        ({"inputs": [1], "outputs": []}, "1 inputs and 0 outputs"),
        ({"test_cases": [{"input": ""}]}, "input and output"),
        ({"test_cases": [{"input": [1], "output": 1, "type": "functional"}]}, "needs fn_name"),
        ({"inputs": None, "outputs": None}, "no tests"),
        (
            {"fn_name": "f", "test_cases": [{"input": {"x": 1}, "output": 1}]},
            "input of f is not a list",
        ),
        ({"fn_name": "f", "test_cases": [{"input": 1, "output": 1}]}, "input of f is not a list"),
        ({"test_cases": [{"input": [1], "output": 1, "type": "file"}]}, "unknown type file"),
    ],
)
def test_what_is_wrong_with_tests_is_said(tests: object, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        cases_of(tests)


def test_blanks_at_the_ends_of_lines_do_not_count() -> None:
    case = Case(("1 2\n3\n",))
    assert passes(case, b"\n1 2  \r\n3") and passes(case, b"1 2\n3\n\n")
    assert (
        not passes(case, b"1  2\n3")
        and not passes(case, b"1 2")
        and not passes(case, b"1 2\n3 \xff")
        and not passes(case, "1 2\u20283".encode())
    )


@pytest.mark.parametrize(
    ("right", "output", "expected"),
    [
        (3, b"3", True),
        (3, b"3.0", True),
        (0.1, b"0.10000001", True),
        (0.1, b"0.1001", False),
        ([1, [0.5]], b"[1, [0.5]]", True),
        ([1, 2], b"[1]", False),
        ({"a": 1.5}, b'{"a": 1.5}', True),
        ({"a": 1}, b'{"b": 1}', False),
        ("3", b"3", False),
        (None, b"null", True),
        (1.0, b"1" * 400, False),
        (1, b"1" * 5000, False),
        ([], b"[" * 100_000, False),
        (0, b"", False),
        (1.0, b"NaN", False),
    ],
)
def test_values_of_functions_are_compared(right: object, output: bytes, expected: bool) -> None:
    assert passes(Case((right,), fn_name="f"), output) is expected
