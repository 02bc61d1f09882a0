"""Programs that try to get out of a stateful sandbox: those of the other one, and some against what it has beside them.

All of them run with `make test-long`, every twelfth with `make test`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from swift_r1.sandboxes.base import SandboxError, SandboxLimits, SandboxOver, SandboxSpec
from swift_r1.sandboxes.local.sandbox import LocalSandbox, open_local
from tests.workers.attempts import ATTEMPTS, SECRET, VARIABLE, Attempt, Targets, read, targets_in

Open = Callable[..., LocalSandbox]
REPOSITORY = Path(__file__).parents[2]
STATEFUL = read(Path(__file__).parent / "escapes" / "stateful.txt")
LIMITS = SandboxLimits(
    cpu_seconds=8, memory_bytes=256 << 20, processes=64, disk_bytes=64 << 20, output_bytes=4096
)
SHORT = 12  # one of so many runs with `make test`
# What the other sandbox refuses, and this one is for. What it shows is made, or the sandbox's own, or everyone's.
GRANTED = {
    "files": """passwd root_listed walk_the_root symlink_swapped_in_tmp write_root remount_writable proc_root proc_of_1
        proc_maps proc_mounts other_devices shared_memory_folder shared_memory_module setuid_files make_setuid
        old_root_by_dot_dot lock_the_library watch_files splice allocate_without_limit many_files many_open_files
        site_packages""",
    "processes": """fork fork_bomb vfork fork_by_number clone_a_process subprocess shell posix_spawn exec_python
        exec_shell exec_made_file exec_from_memory multiprocessing terminal_fork daemon process_file queue_a_signal
        signal_by_process_file zombies no_death_with_parent""",
    "users": "be_root set_all_ids take_capabilities keep_capabilities raise_own_memory",
    "network": "socket_option network_socket network_socket_6 name_lookup listen",
    "harmless": """landlock newest_calls other_controls_of_devices second_filter_that_allows pin_memory
        shared_memory_system_v""",
}
MAY_PRINT = frozenset(" ".join(GRANTED.values()).split())


def some(attempts: list[Attempt]) -> list[object]:
    return [
        pytest.param(one, id=one.name, marks=[] if number % SHORT == 0 else pytest.mark.long)
        for number, one in enumerate(attempts)
    ]


@pytest.fixture(scope="module", autouse=True)
def has_python() -> None:
    if shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip("the machine's own programs have no Python")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Targets]:
    with (
        pytest.MonkeyPatch.context() as patch,
        targets_in(tmp_path_factory.mktemp("home")) as targets,
    ):
        patch.setenv(VARIABLE, SECRET)
        yield targets


def run(box: LocalSandbox, program: str, targets: Targets, seconds: float = 30.0) -> str:
    """Returns what a Python program prints; nothing where it has brought the sandbox to an end."""
    box.write_file("/tmp/program.py", program.encode())
    box.write_file("/tmp/told", targets.told.encode())
    with contextlib.suppress(SandboxOver):
        return box.exec("exec python3 /tmp/program.py < /tmp/told", seconds).output
    return ""


@pytest.mark.parametrize("attempt", some(ATTEMPTS))
def test_nothing_escapes(attempt: Attempt, opened: Open, targets: Targets) -> None:
    seconds = 0.5 if "late" in attempt.marks else 30.0
    started = time.monotonic()
    output = run(opened(LIMITS), attempt.program, targets, seconds)
    assert SECRET not in output
    assert attempt.name in MAY_PRINT or "ESCAPED" not in output, output
    assert time.monotonic() - started < seconds + 10
    targets.check()


@pytest.mark.parametrize("attempt", some(STATEFUL))
def test_nothing_stateful_escapes(attempt: Attempt, opened: Open, targets: Targets) -> None:
    box = opened(LIMITS)
    output = run(box, attempt.program, targets)
    assert SECRET not in output and "ESCAPED" not in output, output
    targets.check()
    assert box.exec("exec echo lives", 20).output.endswith("lives\n")


def marked(word: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if word in process.cmdline():
                found.append(process)
    return found


DAEMONS = """
for i in 1 2 3 4 5; do (trap '' TERM HUP INT; setsid sh -c 'trap "" TERM HUP INT; sleep 77{0}' & ) ; done
nohup sleep 77{0} > /dev/null 2>&1 &
sleep 0.2
"""


def test_what_runs_in_the_background_ends_with_its_episode(allows_sandbox: None) -> None:
    word = f"77{os.getpid()}"
    with open_local(SandboxSpec(limits=LIMITS)) as box:
        box.exec(DAEMONS.format(os.getpid()), 20)
        assert len(marked(word)) == 6
    assert marked(word) == []


def mounts() -> set[str]:
    """Returns this machine's mounts, without the networks that tests beside this one may mount meanwhile."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line for line in lines if " /run/netns" not in line}


def test_all_ends_with_a_parent_that_is_killed(allows_sandbox: None, tmp_path: Path) -> None:
    """No process, no mount, no folder of it stays."""
    word = f"77{os.getpid()}"
    script = (
        "from swift_r1.sandboxes.local.sandbox import *\n"
        "from swift_r1.sandboxes.local.sandbox import _machine\n"
        "boxes = [open_local(SandboxSpec()) for _ in range(3)]\n"
        f"for box in boxes: box.exec({DAEMONS.format(os.getpid())!r}, 20)\n"
        "boxes.append(open_local(SandboxSpec()))\n"
        "print(_machine()._inner.pid, flush=True)\n"
        "boxes[0].exec('sleep 100', 100)\n"
    )
    before = mounts()
    own = {"TMPDIR": str(tmp_path), "SWIFT_R1_CACHE": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    outer = subprocess.Popen([sys.executable, "-c", script], stdout=-1, cwd=tmp_path, env=own)
    assert outer.stdout is not None
    first = psutil.Process(int(outer.stdout.readline()))
    processes = [first, *first.children(recursive=True)]
    assert len(processes) > 18 and len(marked(word)) == 18
    outer.kill()
    outer.communicate()
    assert psutil.wait_procs(processes, timeout=30)[1] == [] and marked(word) == []
    assert mounts() <= before and os.listdir(tmp_path) == []


def test_links_swapped_while_files_are_written_lead_nowhere(opened: Open, targets: Targets) -> None:
    box = opened(LIMITS)
    home = targets.file.parent
    swap = f"""
    mkdir -p real {home}
    while :; do ln -sfn real d; ln -sfn {home} d; ln -sfn /proc/1/root{home} d; ln -sfn /proc/self/cwd d; done
    """
    box.exec(f"({swap}) > /dev/null 2>&1 & sleep 0.2", 20)
    written = 0
    for _ in range(40):
        with contextlib.suppress(SandboxError):
            box.write_file("d/key", b"stolen")
            written += 1
    assert written > 5
    targets.check()
    box.exec(f"rm -f x; ln -s {targets.file} x", 20)
    box.write_file("x", b"stolen")
    assert (
        box.exec(f"test ! -L x && cat x {targets.file} 2>&1 | grep -c {SECRET}", 20).output == "0\n"
    )
    targets.check()


BOMBS = {
    "connections": """
import os, socket
held = []
for _ in range(4):
    if os.fork() == 0: break
server = socket.create_server(("127.0.0.1", 0), backlog=600)
while True:
    try: pair = socket.create_connection(server.getsockname()), server.accept()[0]
    except OSError: break
    held.append(pair)
    for one in pair:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        one.setblocking(False)
        try:
            while True: one.send(bytes(65536))
        except OSError: pass
import time
time.sleep(20)""",
    "one": "x = [bytearray(1 << 20) for _ in range(4096)]",
    "many": """
import os, time
for _ in range(30):
    if os.fork() == 0: break
x = bytearray(b"x") * (150 << 20)
time.sleep(20)""",
    "shared": """
import mmap, os, time
for _ in range(20):
    if os.fork() == 0: break
x = mmap.mmap(-1, 200 << 20)
for start in range(0, 200 << 20, 4096): x[start] = 1
time.sleep(20)""",
    "segments": """
import ctypes, time
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for number in range(100):
    at = libc.shmat(libc.shmget(0, 64 << 20, 0o1600), None, 0)
    ctypes.memset(at, 1, 64 << 20)
    libc.shmdt(ctypes.c_void_p(at))
time.sleep(20)""",
    "stacks": """
import threading, time
threading.stack_size(512 << 20)
def deep():
    import ctypes
    x = bytearray(b"x") * (60 << 20)
    time.sleep(20)
for _ in range(50): threading.Thread(target=deep).start()""",
}


@pytest.mark.parametrize(
    "bomb", [pytest.param(k, marks=[] if k == "many" else pytest.mark.long) for k in BOMBS]
)
def test_memory_has_an_end(bomb: str, opened: Open, targets: Targets) -> None:
    """The machine's free memory never falls by much more than the limit, and the sandbox, or what ran in it, ends."""
    box = opened(LIMITS)
    free = [psutil.virtual_memory().available]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            free.append(psutil.virtual_memory().available)

    watching = threading.Thread(target=watch)
    watching.start()
    output = run(box, BOMBS[bomb], targets, 1.5)
    over.set()
    watching.join()
    fell = (free[0] - min(free)) >> 20
    assert fell < 1200, f"{fell} MiB"
    assert "ESCAPED" not in output
    targets.check()


@pytest.mark.long
def test_output_without_end_costs_the_sandbox(opened: Open) -> None:
    box = opened(LIMITS)
    flood = box.exec("yes", 0.5)
    assert flood.exit_code is None and flood.truncated and len(flood.output) < 4200
    assert box.exec("yes & sleep 0.2", 20).truncated
    started = time.monotonic()
    with pytest.raises(SandboxOver, match="8 seconds of processor time are used"):
        box.exec("sleep 60", 60)
    assert time.monotonic() - started < 40
