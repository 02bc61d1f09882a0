"""The wheel has all that commands read and nothing of the tests; a release refuses what is not ready."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

NEWS = "sed -i '1a - new' CHANGELOG.md; git commit -qam news"
KEY = "ssh-keygen -q -t ed25519 -N '' -C a -f ../key"
ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.check_output(["git", "-C", ROOT, "ls-files"], text=True).splitlines()


def test_the_wheel_has_every_file_and_works_without_a_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in TRACKED:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    words = [
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path / "dist",
        source,
    ]
    subprocess.run([sys.executable, "-m", *words], check=True, timeout=120)
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


@pytest.mark.parametrize(
    ("version", "change", "said"),
    [
        ("", "", "scripts/release.sh VERSION"),
        ("v1", "", "scripts/release.sh VERSION"),
        ("1.0.0", "touch new", "the working tree has changes"),
        ("1.0.0", "git tag v1.0.0", "the tag v1.0.0 is there already"),
        ("1.0.0", "", "CHANGELOG.md has nothing under Unreleased"),
        ("1.0.0", NEWS, "nothing to sign with: SIGNING_KEY="),
        (
            "1.0.0",
            f"{NEWS}; {KEY}",
            "RELEASE_KEYS lacks ../key; its line is: NAME@EXAMPLE namespaces=",
        ),
        (
            "1.0.0",
            f"{NEWS}; {KEY}; rm ../key ../key.pub; mkdir ../key",
            "SIGNING_KEY: ../key is no key of OpenSSH's",
        ),
        (
            "1.0.0",
            f"{NEWS}; {KEY}; cut -d' ' -f1-2 ../key.pub >> RELEASE_KEYS; git commit -qam k",
            "no .venv: make install",
        ),
    ],
)
def test_a_release_refuses_what_is_not_ready(
    version: str, change: str, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "clone"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "release.sh", folder / "scripts")
    shutil.copy(ROOT / "RELEASE_KEYS", folder)
    (folder / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.1.0]\n- one\n")
    commit = "git init -q; git config user.name a; git config user.email a@b; git add .; git commit -qm one"
    subprocess.run(["bash", "-ec", f"{commit}; {change}"], cwd=folder, check=True, timeout=30)
    environ = {name: value for name, value in os.environ.items() if name != "SIGNING_KEY"}
    environ |= {"SIGNING_KEY": "../key"} if KEY in change else {}
    command = ["scripts/release.sh", version]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith(f"release: {said}"), done.stderr
