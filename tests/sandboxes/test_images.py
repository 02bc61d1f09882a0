"""Roots of sandboxes: a folder, and the machine's own programs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_r1.sandboxes.base import SandboxError
from swift_r1.sandboxes.local.sandbox import LocalSandbox
from tests.sandboxes.roots import folder_root

Open = Callable[..., LocalSandbox]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_root(tmp_path_factory.mktemp("root"))


def test_a_folder_is_a_root_and_stays_as_it_is(opened: Open, root: Path) -> None:
    (root / "file").write_text("kept")
    os.chmod(root / "file", 0o600)
    box = opened(image=str(root))
    asked = "cat /file; echo more >> /file; rm -r /usr; mkdir /usr; stat -c %u:%a /file /bin/cat"
    result = box.exec(f"{asked}; ls / | cat", 20)
    assert result.output.startswith("kept0:600\n0:755\nbin\ndev\netc\nfile\n"), result
    assert (root / "file").read_text() == "kept" and (root / "usr").is_dir()
    assert sorted(os.listdir(root)) == ["bin", "file", "lib", "lib64", "usr"]
    with opened(image=str(root)) as other:
        assert other.exec("cat /file", 20).output == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_owners_of_files_are_those_of_the_image(opened: Open, root: Path) -> None:
    (root / "theirs").write_text("")
    os.chown(root / "theirs", 1000, 5)
    result = opened(image=str(root)).exec(
        "stat -c %u:%g /theirs; chown 7 /theirs; stat -c %u /theirs", 20
    )
    assert result.output == "1000:5\n7\n"
    assert (root / "theirs").stat().st_uid == 1000


def test_what_is_no_image_is_said(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"missing is neither 'host' nor a folder with a root"):
        opened(image=str(tmp_path / "missing"))


REPLACED = """
import os, shutil
from swift_r1.sandboxes.base import SandboxSpec
from swift_r1.sandboxes.local.sandbox import open_local
cache = "/etc/ld.so.cache"
for step in (lambda: None, lambda: os.replace(shutil.copy(cache, cache + "~"), cache), lambda: os.unlink(cache)):
    step()
    with open_local(SandboxSpec()) as box:
        print(box.exec("test -s /etc/ld.so.cache && ls /etc", 20).exit_code)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="it mounts over /etc")
def test_a_file_of_the_host_may_be_replaced(allows_sandbox: None, tmp_path: Path) -> None:
    """As `ldconfig` does while a package is installed."""
    etc, python = tmp_path / "etc", shlex.quote(sys.executable)
    etc.mkdir()
    there = f"mount -t tmpfs none {etc} && cp -a /etc/. {etc} && mount --bind {etc} /etc"
    words = ["unshare", "-m", "sh", "-c", f"{there} && exec {python} -c {shlex.quote(REPLACED)}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["0", "0", "0"], done.stderr
