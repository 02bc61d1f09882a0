"""`make install` in a folder of its own: what it says without a Python, and that it stays inside .venv."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = Path(sys.base_prefix) / "bin" / "python3"


def test_without_a_python_it_says_so_in_one_line(tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    result = subprocess.run(
        [tmp_path / "bash", tmp_path / "scripts" / "install.sh"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "no Python 3.11, 3.12 or 3.13. Install one" in result.stderr


@pytest.mark.long
def test_a_venv_without_its_configuration_is_made_again_and_not_installed_through(
    tmp_path: Path,
) -> None:
    """Without pyvenv.cfg `.venv/bin/python` is the base Python: pip would install into the machine's own."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("pyproject.toml", "uv.lock"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run(
        [BASE, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True, timeout=60
    )
    (tmp_path / ".venv" / "pyvenv.cfg").unlink()

    result = subprocess.run(
        ["bash", tmp_path / "scripts" / "install.sh"],
        env={
            **os.environ,
            "PYTHON": str(BASE),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": "",
            "PIP_CONFIG_FILE": os.devnull,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "making it again" in result.stdout
    assert (tmp_path / ".venv" / "pyvenv.cfg").is_file()
    assert result.returncode == 2  # there is no registry
    assert "failed at: 1/3 uv" in result.stderr


def test_a_venv_of_another_folder_is_not_touched_through_a_link(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "here" / "scripts")
    command = tmp_path / "other" / "bin" / "swift"
    command.parent.mkdir(parents=True)
    command.touch()
    (tmp_path / "here" / ".venv").symlink_to(tmp_path / "other")
    done = subprocess.run(
        ["bash", tmp_path / "here" / "scripts" / "install.sh"],
        env={**os.environ, "PYTHON": str(BASE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and ".venv is a link to" in done.stderr
    assert command.exists()
