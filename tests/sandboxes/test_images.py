"""Roots of sandboxes: a folder, an OCI layout with its layers; what would lead out of them is refused."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_r1.sandboxes.base import SandboxError
from swift_r1.sandboxes.local import sandbox
from swift_r1.sandboxes.local.sandbox import LocalSandbox
from tests.sandboxes.roots import folder_root, layer, member, oci_layout, packed

Open = Callable[..., LocalSandbox]
LINK, HARD, FOLDER, FIFO = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_root(tmp_path_factory.mktemp("root"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWIFT_R1_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sandboxes"


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


def test_layers_lie_above_each_other(opened: Open, root: Path, tmp_path: Path, cache: Path) -> None:
    second = layer(
        [
            member("data", type=FOLDER, mode=0o755),
            member("data/one", b"1"),
            member("data/two", b"2"),
            member("folder/", type=FOLDER, mode=0o750),
            member("folder/deep/file", b"lower"),
            member("link", type=LINK, linkname="/folder"),
            member("absolute", type=LINK, linkname="/etc/passwd"),
        ],
        compressed=False,
    )
    third = layer(
        [
            member("data/.wh.one"),
            member("data/hard", type=HARD, linkname="./data/two"),
            member("folder/new", b"new"),
            member("folder/.wh..wh..opq"),
            member("/link/through", b"went"),
            member("pipe", type=FIFO),
            member("device", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
            member("data/two", b"changed", mode=0o700, uid=12, gid=13),
        ]
    )
    layout = oci_layout(tmp_path / "image", [packed(root), second, third], ["NAME=of image", "X=1"])
    box = opened(image=str(layout), env={"X": "2"})
    assert box.exec("ls -A /data /folder; cat /data/* /folder/new; ls /device", 20).output == (
        "/data:\nhard\ntwo\n\n/folder:\nnew\nthrough\n2changednewls: cannot access '/device': "
        "No such file or directory\n"
    )
    owner = "12:13" if os.geteuid() == 0 else "0:0"
    asked = "stat -c %u:%g:%a /data/two; readlink /absolute; echo $NAME $X; test -p /pipe"
    assert box.exec(asked, 20).output == f"{owner}:700\n/etc/passwd\nof image 2\n"
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    before = folder.stat()
    oci_layout(layout, [packed(root), layer([member("other", b"o")])], tag="second")
    assert opened(image=f"{layout}:second").exec("cat /other", 20).output == "o"
    assert opened(image=f"{layout}:latest").exec("cat /data/hard", 20).output == "2"
    assert folder.stat().st_ctime_ns == before.st_ctime_ns  # unpacked once
    with pytest.raises(SandboxError, match=r"2 images .* latest, second"):
        opened(image=str(layout.resolve()) + "/")


@pytest.mark.parametrize(
    "bad",
    [
        [member("../out", b"x")],
        [member("a/../../out", b"x")],
        [member("hard", type=HARD, linkname="../../out")],
    ],
)
def test_names_that_lead_out_are_refused(
    bad: list[tuple[tarfile.TarInfo, bytes]], opened: Open, tmp_path: Path, cache: Path
) -> None:
    layout = oci_layout(tmp_path / "image", [layer(bad)])
    with pytest.raises(SandboxError, match="leads out of it"):
        opened(image=str(layout))
    assert not list(tmp_path.rglob("out"))


def test_links_out_of_an_image_stay_in_it(opened: Open, root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    bad = [
        member("out", type=LINK, linkname=str(tmp_path / "outside")),
        member("up", type=LINK, linkname="../../../../../.." + str(tmp_path / "outside")),
        member("out/file", b"x"),
        member("up/file", b"x"),
        member("hard", type=HARD, linkname="/etc/passwd"),
    ]
    layout = oci_layout(tmp_path / "image", [packed(root), layer(bad)])
    with pytest.raises(SandboxError, match="cannot be unpacked"):
        opened(image=str(layout))
    assert os.listdir(tmp_path / "outside") == []


def test_what_is_no_image_is_said(opened: Open, root: Path, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"missing is neither 'host' nor a folder nor an OCI"):
        opened(image=str(tmp_path / "missing"))
    layout = oci_layout(tmp_path / "image", [layer([member("file", b"x" * 1000)])])
    for path in (layout / "blobs" / "sha256").iterdir():
        if path.read_bytes()[:2] == b"\x1f\x8b":
            path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(SandboxError, match="is damaged"):
        opened(image=str(layout))
    zstandard = oci_layout(tmp_path / "zstandard", [b"\x28\xb5\x2f\xfd...."])
    with pytest.raises(SandboxError, match="skopeo copy --dest-compress-format gzip"):
        opened(image=str(zstandard))
    broken = oci_layout(tmp_path / "broken", [packed(root)[:-1000]])
    with pytest.raises(SandboxError, match="cannot be unpacked: "):
        opened(image=str(broken))


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


def test_an_image_that_cannot_be_shown_is_tried_once_more(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened()
    machine = sandbox._machine()
    monkeypatch.setattr(machine, "_rootfs", {})
    live_in, faults = machine._live_in, [SandboxError("it is gone")]

    def live(folder: str) -> socket.socket:
        if faults:
            raise faults.pop()
        return live_in(folder)

    monkeypatch.setattr(machine, "_live_in", live)
    assert opened().exec("true", 20).exit_code == 0
    assert "it is gone; once more" in caplog.text
    machine._rootfs.clear()
    faults += [SandboxError("the second"), SandboxError("the first")]
    with pytest.raises(SandboxError, match="the second"):
        opened()
