"""The system calls of Linux that Python does not have: namespaces, mounts, privileges. Each raises OSError."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

# <sched.h>
NEW_MOUNTS = 0x00020000
NEW_NAMES = 0x04000000
NEW_IPC = 0x08000000
NEW_USERS = 0x10000000
NEW_PIDS = 0x20000000
NEW_NET = 0x40000000
# <sys/mount.h>
NO_SUID = 0x2
NO_DEVICES = 0x4
NO_EXEC = 0x8
BIND = 0x1000
RECURSIVE = 0x4000
PRIVATE = 0x40000

DEVICE_OF = {"/dev/zero": "/dev/full"}
"""What stands for a device in a sandbox: both read as zeros, and a shared map of /dev/zero is memory that nobody counts."""

# x86-64
_SYS_CAPSET = 126
_SYS_PIVOT_ROOT = 155
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_MOUNT_SETATTR = 442
_SET_DEATH_SIGNAL = 1
_SET_DUMPABLE = 4
_SET_NO_NEW_PRIVILEGES = 38
_SET_SECCOMP = 22
_CLEAR_AMBIENT = (47, 4)
_DROP_FROM_BOUNDS = 24
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(spaces: int) -> None:
    _checked("unshare", _libc.unshare(ctypes.c_int(spaces)))


def mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [
        None if text is None else os.fsencode(text) for text in (source, target, kind, options)
    ]
    _checked(f"mount on {target}", _libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def seal_mounts(path: str) -> None:
    """Makes all mounts from `path` down read-only, their setuid bits without effect. Linux 5.12."""
    _set_mounts(path, 0x8000, 0x1 | NO_SUID, 0)


def clone_tree(path: str, users: int) -> int:
    """Returns a mount of a folder for another namespace, in which its files belong to the users of the namespace that
    `users` is a descriptor of: to number 0 of those what is root's, and so on. It takes the machine's root. Linux 5.19.
    """
    tree = _syscall("open_tree", _SYS_OPEN_TREE, -100, os.fsencode(path), 0x1 | os.O_CLOEXEC)
    attributes = struct.pack("4Q", 0x00100000, 0, 0, users)
    try:
        _syscall(
            "mount_setattr", _SYS_MOUNT_SETATTR, tree, b"", 0x1000, attributes, len(attributes)
        )
    except OSError:
        os.close(tree)
        raise
    return tree


def attach_tree(tree: int, path: str) -> None:
    """Puts what `clone_tree` returned into this namespace."""
    _syscall("move_mount", _SYS_MOVE_MOUNT, tree, b"", -100, os.fsencode(path), 0x4)


def unseal_mount(path: str) -> None:
    """Makes a mount of this namespace writable again."""
    _set_mounts(path, 0, 0, 0x1)


def _set_mounts(path: str, flags: int, wanted: int, unwanted: int) -> None:
    # struct mount_attr: set, clear, propagation, user namespace
    attributes = struct.pack("4Q", wanted, unwanted, 0, 0)
    _syscall(
        "mount_setattr",
        _SYS_MOUNT_SETATTR,
        -100,
        os.fsencode(path),
        flags,
        attributes,
        len(attributes),
    )


def enter_root(path: str) -> None:
    """Makes `path`, a mount, the root; nothing of the old one stays."""
    os.chdir(path)
    _syscall("pivot_root", _SYS_PIVOT_ROOT, b".", b".")
    # MNT_DETACH: the old root, which now lies over the new one
    _checked("umount", _libc.umount2(b".", 2))
    os.chdir("/")


def join(space: int, kind: int) -> None:
    """Goes into the namespace that a descriptor of /proc/<pid>/ns stands for; with 0, into that of the next fork."""
    _checked("setns", _libc.setns(ctypes.c_int(space), ctypes.c_int(kind)))


def raise_loopback() -> None:
    """Brings the loopback of this network namespace up."""
    with socket.socket() as any_socket:
        wanted = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # struct ifreq: IFF_UP, IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, wanted)  # SIOCSIFFLAGS


def drop_privileges(user: int | None, kept: Collection[int] = ()) -> None:
    """Becomes `user` (and the group of that number), without capabilities but `kept`, and with no way to get any."""
    for capability in range(64):
        if capability in kept:
            continue
        if _libc.prctl(_DROP_FROM_BOUNDS, ctypes.c_ulong(capability), 0, 0, 0) == -1:
            break  # the kernel knows no more of them
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    mask = sum(1 << capability for capability in kept)
    # struct __user_cap_data_struct of the lower 32 of them, and of the upper: effective, permitted, inheritable
    sets = struct.pack("6I", mask, mask, 0, 0, 0, 0)
    _syscall("capset", _SYS_CAPSET, struct.pack("Ii", 0x20080522, 0), sets)
    _prctl(*_CLEAR_AMBIENT, 0)
    _prctl(_SET_NO_NEW_PRIVILEGES, 1)


def show_command(name: bytes) -> None:
    """Shows `name` as this process's command, and that of its forks, in /proc: it lies in their own memory."""
    words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = int(words[45]), int(words[46])  # arg_start and arg_end of proc(5)
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, name, min(len(name), last - first - 1))


def set_dumpable(dumpable: bool) -> None:
    """Says whether others of the same user may look into this process, and own its files of /proc."""
    _prctl(_SET_DUMPABLE, int(dumpable))


def end_with_parent() -> None:
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def filter_calls(program: bytes) -> None:
    """Puts a seccomp filter, an array of `struct sock_filter`, over this process for good."""
    code = ctypes.create_string_buffer(program, len(program))
    whole = _SockFprog(len(program) // 8, ctypes.addressof(code))
    _prctl(_SET_SECCOMP, 2, ctypes.addressof(whole))


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _prctl(option: int, first: int, second: int = 0) -> None:
    _checked(
        f"prctl {option}", _libc.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), 0, 0)
    )


def _syscall(what: str, number: int, *arguments: Any) -> int:
    plain = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *plain)
    _checked(what, result)
    return result
