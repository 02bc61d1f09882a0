"""A stateful sandbox of this machine: what its user gets, and that nothing of it stays."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable

import pytest

from swift_r1.sandboxes.base import (
    ExecResult,
    SandboxError,
    SandboxLimits,
    SandboxOver,
    SandboxSpec,
)
from swift_r1.sandboxes.local import sandbox
from swift_r1.sandboxes.local.sandbox import LocalSandbox, open_local
from swift_r1.sandboxes.providers import open_sandbox

Open = Callable[..., LocalSandbox]


def printed(box: LocalSandbox, command: str, seconds: float = 20.0) -> str:
    result = box.exec(command, seconds)
    assert result.exit_code == 0, result
    return result.output


def test_files_and_processes_live_until_the_end(opened: Open) -> None:
    box = opened(env={"NAME": "value"})
    assert printed(box, "pwd; echo $NAME; id -u; hostname") == "/workspace\nvalue\n0\nsandbox\n"
    assert printed(box, "cd /tmp; echo one > /etc/file; echo err >&2") == "err\n"
    assert printed(box, "pwd; cat /etc/file") == "/workspace\none\n"
    assert printed(box, "(while sleep 0.05; do echo again; done) & echo $! > pid") == ""
    assert printed(box, "sleep 0.2; kill $(cat pid)") == ""
    assert box.exec("kill $(cat pid)", 20).exit_code == 1
    assert box.exec("kill -9 $$", 20).exit_code == -9
    assert box.exec("exit 3", 20) == ExecResult(3, "")
    assert box.exec("echo \0", 20) == ExecResult(126, "embedded null byte\n")
    assert box.exec("echo \ud800", 20).output == "?\n"
    long = box.exec("echo " + "x" * 200_000, 20)
    assert (long.exit_code, long.output[:9]) == (126, "[Errno 7]")
    flood = box.exec("yes & echo begun; sleep 0.2", 20)
    assert flood.exit_code == 0 and flood.truncated


def test_a_command_out_of_time_ends_with_what_it_started(opened: Open) -> None:
    box = opened()
    printed(box, "sleep 1001 & sleep 0.1")
    started = time.monotonic()
    late = box.exec("echo begun; (setsid sleep 1002 & ); setsid sleep 1003 & sleep 1004", 0.5)
    assert late == ExecResult(None, "begun\n")
    assert time.monotonic() - started < 5
    running = printed(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "1001" in running and not any(word in running for word in ("1002", "1003", "1004"))


def test_what_is_printed_has_a_head_and_a_tail(opened: Open) -> None:
    box = opened(SandboxLimits(output_bytes=1000))
    whole = box.exec("seq 200", 20)
    assert not whole.truncated and whole.output.splitlines() == [str(n) for n in range(1, 201)]
    cut = box.exec("seq 100000", 20)
    assert cut.truncated and cut.output.startswith("1\n2\n") and cut.output.endswith("\n100000\n")
    assert "[... 587895 bytes are left out ...]" in cut.output  # 588,895 less 1,000
    assert box.exec("printf '\\377'", 20).output == "\N{REPLACEMENT CHARACTER}"


def test_write_file_takes_the_place_of_what_is_there(opened: Open) -> None:
    box = opened()
    box.write_file("/tests/deep/run.sh", b"echo ran", 0o755)
    assert printed(box, "/tests/deep/run.sh") == "ran\n"
    printed(box, "echo kept > kept; ln -s kept link; mkfifo pipe; mkdir folder")
    for name in ("link", "pipe", "kept"):
        box.write_file(name, b"\0new")
    assert printed(box, "cat link pipe kept | tr '\\0' .; ls") == (
        ".new.new.newfolder\nkept\nlink\npipe\n"
    )
    with pytest.raises(SandboxError, match=r"folder cannot be written .* Is a directory"):
        box.write_file("folder", b"")
    assert printed(box, "ls -A") == "folder\nkept\nlink\npipe\n"


def test_limits_of_a_whole_life(opened: Open) -> None:
    short = opened(SandboxLimits(seconds=0.5))
    with pytest.raises(SandboxOver, match=r"its 0\.5 seconds are over"):
        short.exec("sleep 20", 20)
    with pytest.raises(SandboxOver, match=r"its 0\.5 seconds are over"):
        short.exec("true", 20)
    busy = opened(SandboxLimits(cpu_seconds=1))
    with pytest.raises(SandboxOver, match="its 1 seconds of processor time are used"):
        busy.exec("while :; do (:) & wait; done", 60)


def test_forks_of_its_process_have_sandboxes_of_their_own(opened: Open) -> None:
    box = opened()
    printed(box, "echo kept > file")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with open_local(SandboxSpec()) as own:
                os.write(write, own.exec("ls -A; echo theirs", 20).output.encode())
            box.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"theirs\n"
    assert printed(box, "cat file") == "kept\n"


def test_a_machine_that_was_killed_has_a_successor(opened: Open) -> None:
    box = opened()
    [first] = sandbox._machines
    os.kill(first._inner.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="the sandbox broke"):
        box.exec("sleep 20", 20)
    assert printed(opened(), "echo again") == "again\n"


def test_limits_and_ways_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="processes must be a whole number above 0, got 0"):
        SandboxLimits(processes=0)
    with pytest.raises(
        ValueError, match="there is no provider of sandboxes elsewhere: known are local"
    ):
        open_sandbox("elsewhere", SandboxSpec())


def test_programs_find_what_they_need(opened: Open) -> None:
    box = opened()
    find = "import pty, os; print(os.ttyname(pty.openpty()[1]))"
    assert printed(box, f"python3 -c '{find}'") == "/dev/pts/0\n"
    assert (
        printed(box, "cat <(echo substituted) > /dev/stdout; nproc > /dev/null") == "substituted\n"
    )
    assert printed(box, "tr '\\0' ' ' < /proc/1/cmdline").strip() == "swift-r1-sandbox"
    look = "import multiprocessing as m; print(m.Pool(2).map(abs, [1, -2]))"
    assert printed(box, f"python3 -c '{look}'") == "[1, 2]\n"
    other = "import socket; socket.socket(socket.AF_NETLINK)"
    assert "Address family not supported" in box.exec(f"python3 -c '{other}'", 20).output


def test_each_sandbox_has_processes_of_its_own(opened: Open) -> None:
    boxes = [opened(SandboxLimits(processes=10)) for _ in range(3)]
    for box in boxes:
        begun = "for i in 1 2 3 4 5 6 7 8; do sleep 100 & done; echo begun"
        assert printed(box, begun) == "begun\n"
    more = "import os; print([os.fork() and 1 for _ in range(2)])"
    assert "BlockingIOError" in boxes[0].exec(f"exec python3 -c '{more}'", 20).output


COUNTED = {
    "page tables": """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
at = libc.mmap(None, ctypes.c_size_t(1 << 40), 1, 0x4022, -1, ctypes.c_long(0))
libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(1 << 40), 15)
for start in range(at, at + (1 << 40), 2 << 20): ctypes.c_char.from_address(start).value""",
    "sockets": """
import socket, time
held = [socket.socketpair() for _ in range(200)]
time.sleep(20)""",
    "sockets on their way": """
import array, socket, time
way = socket.socketpair()
for _ in range(200):
    one, two = socket.socketpair()
    way[0].sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [one.fileno(), two.fileno()]))])
    one.close(), two.close()
time.sleep(20)""",
    "pipes": """
import os, time
os.fork()
held = [os.pipe() for _ in range(490)]
time.sleep(20)""",
}


@pytest.mark.parametrize("what", COUNTED)
def test_memory_that_no_process_shows_counts(what: str, opened: Open) -> None:
    box = opened(SandboxLimits(memory_bytes=64 << 20))
    box.write_file("program.py", COUNTED[what].encode())
    said = box.exec("python3 program.py", 15)
    assert "more than 64 MiB of memory: python3 was killed" in said.output, said
    assert box.exec("echo lives", 20).output == "lives\n"


def test_what_the_machines_user_needs_is_left(opened: Open) -> None:
    """Watches of files, and locks on the machine's own."""
    box = opened()
    watch = "import ctypes; init = ctypes.CDLL(None).inotify_init; print([init() for _ in range(300)].index(-1))"
    assert printed(box, f"python3 -c '{watch}'") == "16\n"
    lock = "import fcntl; fcntl.flock(open('/bin/sh'), fcntl.LOCK_EX); input()"
    box.exec(f'sleep 60 | python3 -c "{lock}" & sleep 0.5', 20)
    with open("/bin/sh", "rb") as own:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
