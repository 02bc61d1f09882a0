"""The wheel has all that commands read and nothing of the tests; a release refuses what is not ready."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.check_output(["git", "-C", ROOT, "ls-files"], text=True).splitlines()


def test_the_wheel_has_every_file_and_works_without_a_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in TRACKED:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    words = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist", source]
    subprocess.run([sys.executable, "-m", *words], check=True, timeout=120)
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "installed")
    wanted = {name for name in TRACKED if name.startswith("swift_r1/") and (ROOT / name).is_file()}
    wanted |= {f"swift_r1/bundled/{name}" for name in TRACKED if name.startswith(("examples/", "plugins/"))}
    assert packed == {name for name in wanted if (ROOT / name.removeprefix("swift_r1/bundled/")).exists()}
    done = subprocess.run(
        [sys.executable, "-m", "swift_r1", "examples", "copy", "countdown"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plugins/countdown.py").read_bytes() == (ROOT / "plugins/countdown.py").read_bytes()


@pytest.mark.parametrize(
    ("version", "change", "said"),
    [
        ("", "", "scripts/release.sh VERSION"),
        ("v1", "", "scripts/release.sh VERSION"),
        ("1.0.0", "touch new", "the working tree has changes"),
        ("1.0.0", "git tag v1.0.0", "the tag v1.0.0 is there already"),
        ("1.0.0", "", "CHANGELOG.md has nothing under Unreleased"),
    ],
)
def test_a_release_refuses_what_is_not_ready(version: str, change: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release.sh", tmp_path / "scripts")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.1.0]\n- one\n")
    commit = "git init -q; git add .; git -c user.name=a -c user.email=a@b commit -qm one"
    subprocess.run(["bash", "-ec", f"{commit}; {change}"], cwd=tmp_path, check=True, timeout=30)
    done = subprocess.run(
        ["scripts/release.sh", version], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith(f"release: {said}"), done.stderr
