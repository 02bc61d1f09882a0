"""What `scripts/newest.py` says: of pip's resolver, and in its table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
CONFLICT = """ERROR: Cannot install numpy==2.4.6 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested numpy==2.4.6
    numba 0.65.0 depends on numpy<2.4 and >=1.22

To fix this you could try to:
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


def test_a_conflict_is_named_in_one_line(newest: ModuleType) -> None:
    assert newest.conflict(CONFLICT) == "The user requested numpy==2.4.6; numba 0.65.0 depends on numpy<2.4 and >=1.22"
    assert newest.conflict("ERROR: no such version\nmore") == "ERROR: no such version"


def test_the_table_says_what_broke_and_what_is_beyond_its_range(newest: ModuleType) -> None:
    outcomes = [
        newest.Outcome("one", Version("1.0"), Version("1.0"), True, ""),
        newest.Outcome("two", Version("1.0"), Version("2.0"), False, "FAILED tests/a.py::b - x | y"),
        newest.Outcome("three", Version("1.0"), Version("1.1"), True, ""),
    ]
    lines = newest.table(outcomes, False).splitlines()
    assert [line.split()[-1] for line in lines] == ["outcome", "locked", "y", "before"]
    assert "| two | 1.0 | 2.0 | no | FAILED tests/a.py::b - x \\| y |" in newest.table(outcomes, True)
