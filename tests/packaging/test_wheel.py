"""The wheel has all that commands read and nothing of the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.check_output(["git", "-C", ROOT, "ls-files"], text=True).splitlines()


def test_the_wheel_has_every_file_and_works_without_a_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in TRACKED:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    build = (
        f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path / 'dist')!r})"
    )
    words = [sys.executable, "-c", build]  # as pip does
    subprocess.run(words, cwd=source, check=True, stdout=subprocess.DEVNULL, timeout=120)
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "installed")
    wanted = {name for name in TRACKED if name.startswith("swift_r1/") and (ROOT / name).is_file()}
    wanted |= {
        f"swift_r1/cli/bundled/{name}"
        for name in TRACKED
        if name.startswith(("examples/", "plugins/"))
    }
    assert packed == {
        name for name in wanted if (ROOT / name.removeprefix("swift_r1/cli/bundled/")).exists()
    }
    done = subprocess.run(
        [sys.executable, "-m", "swift_r1", "init", "countdown"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plugins/countdown.py").read_bytes() == (
        ROOT / "plugins/countdown.py"
    ).read_bytes()
