"""What docs/plugins.md shows is what the code takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
PLUGINS = (ROOT / "docs" / "plugins.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PLUGINS, re.MULTILINE | re.DOTALL)


def test_the_plugins_on_the_page_pass_the_check(tmp_path: Path) -> None:
    sums, _, again, searches, improving = BLOCKS
    (tmp_path / "searches.py").write_text(searches)
    (tmp_path / "sums.py").write_text(sums)
    (tmp_path / "again.py").write_text(again)
    (tmp_path / "improving.py").write_text(improving)
    words = [
        "check",
        "--external_plugins",
        "sums.py",
        "again.py",
        "improving.py",
        "searches.py",
        "--multi_turn_scheduler",
        "again",
        "--dataset",
        "sums#20",
        "--reward_funcs",
        "last_number",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "swift_r1", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    (reward,) = json.loads(done.stdout)["rewards"]
    assert reward["tells_right"] is True and reward["problems"] == []


def test_a_plugin_is_tested_as_the_page_says(tmp_path: Path) -> None:
    plugin, test, *_ = BLOCKS
    (tmp_path / "my_plugin.py").write_text(plugin)
    (tmp_path / "test_my_plugin.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_plugin.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
