"""The mounts of a sandbox.

A rootfs is a small root with an image, devices, and a place for a layer; the rest of the machine is not in it. It is made
once for an image. A sandbox is a fork in a copy of its namespace, where a layer, a file system in memory of limited
size, takes what is written, and an overlay shows it above the image.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from swift_r1.workers.sandbox import kernel

HOST = "host"
ROOT = "/root"  # where the rootfs has the sandbox's root
_BASE = "/base"
_LAYER = "/layer"
_PROGRAMS = "/programs"
_BYTES_PER_FILE = 4096  # of a layer, for each file that it has room for
# of the image `host`: nothing of it is a secret, nor made for one machine
_SHOWN = (
    "usr",
    "bin",
    "sbin",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "etc/alternatives",
    "etc/ld.so.cache",
    "etc/ssl/certs",
)
_EMPTY = (
    "dev",
    "etc",
    "home",
    "mnt",
    "opt",
    "proc",
    "run",
    "srv",
    "var/cache",
    "var/lib",
    "var/log",
)
_MADE = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/hostname": "sandbox\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_HOSTS = "/etc/hosts"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_TERMINALS = "newinstance,ptmxmode=666,mode=620,max=64"
# so that a connection's buffers are no larger than those of other sockets
_NETWORK = {"ip_unprivileged_port_start": "0"} | dict.fromkeys(
    ("tcp_rmem", "tcp_wmem"), "4096 65536 106496"
)
# of all sandboxes of a user together, or of each where it is root: the machine's own limit is its user's, too
_WATCHED = {"max_inotify_instances": "16", "max_inotify_watches": "8192"}
_QUIET = kernel.NO_SUID | kernel.NO_DEVICES


def make_rootfs(image: str, tree: int | None) -> tuple[str, ...]:
    """Goes into a rootfs of its own. Returns the places in it that lie above the image. Raises OSError.

    Args:
        image: HOST, or a folder.
        tree: a mount of that from outside.
    """
    new = "/proc"  # a folder below which nothing lies that goes into the rootfs
    kernel.unshare(kernel.NEW_MOUNTS)
    kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    inner_proc = "/sys"  # beside the machine's own, without which the kernel makes no other
    kernel.mount("proc", inner_proc, "proc", _QUIET | kernel.NO_EXEC)
    for name, most in _WATCHED.items():
        Path(inner_proc, "sys/user", name).write_text(most)
    kernel.mount("tmpfs", new, "tmpfs", _QUIET, "size=4m,mode=755")
    for folder in (ROOT, _BASE, _LAYER, _PROGRAMS, "/dev", "/proc"):
        os.makedirs(new + folder)
    kernel.mount(inner_proc, new + "/proc", None, kernel.BIND | kernel.RECURSIVE)
    shown: list[str] = []
    if image == HOST:
        shown = _show_programs(new)
    elif tree is not None:
        kernel.attach_tree(tree, new + _BASE)
    else:
        kernel.mount(image, new + _BASE, None, kernel.BIND | kernel.RECURSIVE)
    _make_devices(new + "/dev")
    kernel.enter_root(new)
    kernel.seal_mounts("/")
    kernel.unseal_mount("/proc")  # supervisors write maps of users there
    return tuple(shown)


def open_root(disk_bytes: int, shown: Sequence[str]) -> None:
    """Makes the root of a sandbox in a copy of its rootfs. Raises OSError, and ValueError where what lies in the image
    leaves no place for it.

    Args:
        disk_bytes: of its layer.
        shown: what `make_rootfs` returned.
    """
    options = f"size={disk_bytes},nr_inodes={disk_bytes // _BYTES_PER_FILE + 16},mode=755"
    kernel.mount("tmpfs", _LAYER, "tmpfs", _QUIET, options)
    for name in ("upper", "work", "shm"):
        os.mkdir(f"{_LAYER}/{name}")
    os.chmod(f"{_LAYER}/shm", 0o1777)
    # an overlay could be made without them, but not a folder anew in the place of the image's
    os.setxattr(f"{_LAYER}/upper", "user.swift_r1", b"")
    os.removexattr(f"{_LAYER}/upper", "user.swift_r1")
    overlay = f"lowerdir={_BASE},upperdir={_LAYER}/upper,workdir={_LAYER}/work"
    kernel.mount("overlay", ROOT, "overlay", _QUIET, f"{overlay},userxattr")
    for place in shown:
        kernel.mount(_PROGRAMS + place, ROOT + place, None, kernel.BIND | kernel.RECURSIVE)
    for name in ("/dev", "/proc"):
        if not os.path.lexists(ROOT + name):
            os.mkdir(ROOT + name)
        elif not stat.S_ISDIR(os.lstat(ROOT + name).st_mode):
            raise ValueError(f"{name} is no folder there")
    kernel.mount("/dev", ROOT + "/dev", None, kernel.BIND | kernel.RECURSIVE)
    kernel.mount("devpts", ROOT + "/dev/pts", "devpts", kernel.NO_SUID | kernel.NO_EXEC, _TERMINALS)
    kernel.mount(f"{_LAYER}/shm", ROOT + "/dev/shm", None, kernel.BIND)


def enter_root() -> int:
    """Makes the sandbox's root that of this process, the first of the sandbox, with a /proc of its own. Returns the
    descriptor of that. Raises OSError."""
    kernel.unshare(kernel.NEW_MOUNTS)
    kernel.mount("proc", ROOT + "/proc", "proc", _QUIET | kernel.NO_EXEC)
    for name, value in _NETWORK.items():  # its network is its own
        Path(ROOT + "/proc/sys/net/ipv4", name).write_text(value)
    kernel.seal_mounts(ROOT + "/proc")
    kernel.enter_root(ROOT)
    if not os.path.lexists(_HOSTS):
        os.makedirs(os.path.dirname(_HOSTS), exist_ok=True)
        Path(_HOSTS).write_text(_MADE["etc/hosts"])
    return os.open("/proc", os.O_DIRECTORY | os.O_CLOEXEC)


def _show_programs(new: str) -> list[str]:
    """Fills the base with what a root has, and binds the machine's programs beside it. Returns their places."""
    base = new + _BASE
    for name in _EMPTY:
        os.makedirs(f"{base}/{name}")
    os.mkdir(f"{base}/root", 0o700)
    for name in ("tmp", "var/tmp"):
        os.mkdir(f"{base}/{name}")
        os.chmod(f"{base}/{name}", 0o1777)
    for name, text in _MADE.items():
        Path(base, name).write_text(text)
    shown = []
    with open("/sys/self/mountinfo", encoding="utf-8") as file:
        mounts = [line.split()[4] for line in file]
    for name in _SHOWN:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{base}/{name}")
        elif os.path.isfile(f"/{name}"):  # no mount of it could be used once it is replaced
            Path(base, name).write_bytes(Path("/", name).read_bytes())
        elif os.path.exists(f"/{name}"):
            for place in (f"{base}/{name}", f"{new}{_PROGRAMS}/{name}"):
                os.makedirs(place)
            # an overlay does not show what is mounted below, but a lock on its files is not one on the machine's
            if any(place.startswith(f"/{name}/") for place in mounts):
                kernel.mount(
                    f"/{name}", f"{new}{_PROGRAMS}/{name}", None, kernel.BIND | kernel.RECURSIVE
                )
            else:
                layers = f"lowerdir=/{name}:{base}/mnt,userxattr"
                kernel.mount("overlay", f"{new}{_PROGRAMS}/{name}", "overlay", _QUIET, layers)
            shown.append(f"/{name}")
    return shown


def _make_devices(folder: str) -> None:
    for name in _DEVICES:
        Path(folder, name).touch()
        device = f"/dev/{name}"
        kernel.mount(kernel.DEVICE_OF.get(device, device), f"{folder}/{name}", None, kernel.BIND)
    for name, target in _LINKS.items():
        os.symlink(target, f"{folder}/{name}")
    for name in ("shm", "pts"):
        os.mkdir(f"{folder}/{name}")
