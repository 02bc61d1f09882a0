"""In continuous integration a test that is skipped for want of data fails; any other skip stays a skip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MARKED = "import pytest\n@pytest.mark.data\ndef test_it():\n    pytest.skip('no data')\n"
NAMED = "import pytest\n@pytest.mark.skipif(True, reason='set SWIFT_R1_DATA')\ndef test_it():\n    pass\n"
WHOLE_FILE = "import pytest\npytest.skip('set SWIFT_R1_DATA', allow_module_level=True)\n"
OTHER = "import pytest\ndef test_it():\n    pytest.skip('no GPU')\n"


def run(tmp_path: Path, test: str, required: bool) -> int:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = data: needs data\n")
    (tmp_path / "test_it.py").write_text(test)
    env = {**os.environ, "SWIFT_R1_REQUIRE_DATA": "1" if required else ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=60).returncode


@pytest.mark.parametrize("test", [MARKED, NAMED, WHOLE_FILE], ids=["marked", "named", "whole file"])
def test_a_skip_for_want_of_data_fails_where_data_is_required(tmp_path: Path, test: str) -> None:
    assert run(tmp_path, test, required=True) in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)


@pytest.mark.parametrize(("test", "required"), [(OTHER, True), (MARKED, False)], ids=["other reason", "not required"])
def test_any_other_skip_stays_one(tmp_path: Path, test: str, required: bool) -> None:
    assert run(tmp_path, test, required) == pytest.ExitCode.OK
