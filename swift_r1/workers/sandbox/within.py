"""What runs inside the sandbox: a process that has gone into namespaces and a root of its own, and more for each run.

`box.py` starts it as a program of its own, with nothing of the trainer's but one socket:

1. It loads Python's compiled modules, leaves the namespaces it was in, and gets its users mapped from outside.
2. Its child, process 1 of the new ones, makes the root: Python's library, read-only; an empty /tmp; three devices.
3. It forks supervisors. Each makes a process namespace and a /tmp, takes one run from the socket, and forks the program. So
   no run is in any memory that a later one inherits.

What a program should print or return is never in here: that is compared outside. A program has no capability and cannot
start processes (`calls.py`); as process 1 of its namespace it ends whole when the supervisor kills it, as all does with 2.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import math
import os
import random
import resource
import select
import signal
import socket
import sys
import sysconfig
import threading
import types
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from swift_r1.workers.sandbox import entry, kernel
from swift_r1.workers.sandbox.calls import call_filter

NOBODY = 65534
OUTPUT_BYTES = 8 << 20  # of what a program prints or returns, and of each of its files
_TMP = "size=64m,nr_inodes=1000,mode=1777"
# signals that wait, and timers: counted with those of the trainer's user
_THREADS = 32
_OPEN_FILES = 64
_SIGNALS = 64
_SUPERVISORS = 2  # one may get ready while the other has a run
_NOTHING_TO_RUN = 3  # exit code of a supervisor
_NOT_LOADED = ("_test", "_ctypes_test", "xx", "_xx", "_tkinter", "_curses", "readline")
_COMMON = "bisect collections copy dataclasses datetime decimal enum fractions functools heapq io itertools math "
_COMMON += "operator queue re statistics string textwrap typing"
_PRELUDE = "\n".join(  # what public sets of functions take for granted
    f"import {name}\nfrom {name} import *"
    for name in ("math", "collections", "itertools", "functools", "heapq", "bisect", "typing")
)


class _Ready(NamedTuple):
    """What all runs have in common: bytes of address space, the user to become, the prelude, the filter."""

    size: int
    user: int | None
    prelude: types.CodeType
    calls: bytes


def main(control: socket.socket) -> None:
    """Enters, says READY (or FAILED and why), and then takes a socket for each run until nobody holds its own."""
    try:
        _load_modules()
        size = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
        library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
        user = NOBODY if entry.enter(control) == entry.WANTED_USERS else None
        kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_NET | kernel.NEW_IPC | kernel.NEW_NAMES)
        _make_root(list(dict.fromkeys(library)))
    except (OSError, ImportError) as error:
        control.sendall(entry.FAILED + str(error).encode())
        os._exit(1)
    ready = _Ready(
        size, user, compile(_PRELUDE, "prelude", "exec", dont_inherit=True), call_filter()
    )
    gc.freeze()
    control.sendall(entry.READY)
    supervisors: set[int] = set()
    while True:
        while len(supervisors) < _SUPERVISORS:
            supervisor = os.fork()
            if supervisor == 0:
                _keep(control, ready)
            supervisors.add(supervisor)
        ended, status = os.wait()
        if ended in supervisors and os.waitstatus_to_exitcode(status) == _NOTHING_TO_RUN:
            os._exit(0)
        supervisors.discard(ended)


def _load_modules() -> None:
    """Loads Python's compiled modules with their libraries: they are not in the root."""
    ctypes.CDLL("libgcc_s.so.1")  # glibc loads it when a thread is cancelled
    names = [
        file.name.partition(".")[0]
        for file in Path(sysconfig.get_config_var("DESTSHARED")).glob("*.so")
    ]
    for name in (*_COMMON.split(), *names):
        if not name.startswith(_NOT_LOADED):
            with contextlib.suppress(ImportError):  # its library is not on this machine
                importlib.import_module(name)


def _make_root(library: list[str]) -> None:
    new = "/proc"  # a folder below which nothing lies that goes into the root
    kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("tmpfs", new, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, "size=1m,mode=755")
    for folder in library:
        os.makedirs(new + folder)
        kernel.mount(folder, new + folder, None, kernel.BIND | kernel.RECURSIVE)
        for packages in ("site-packages", "dist-packages"):
            if os.path.isdir(new + folder + "/" + packages):
                kernel.mount(
                    "tmpfs",
                    f"{new}{folder}/{packages}",
                    "tmpfs",
                    kernel.NO_SUID,
                    "size=4k,mode=755",
                )
    os.mkdir(new + "/dev")
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        Path(new + device).touch()
        kernel.mount(kernel.DEVICE_OF.get(device, device), new + device, None, kernel.BIND)
    os.mkdir(new + "/tmp")
    kernel.enter_root(new)
    kernel.seal_mounts("/")
    socket.sethostname("sandbox")


def _keep(control: socket.socket, ready: _Ready) -> NoReturn:
    """Takes a line, runs what it asks for, and answers: a line of JSON, and what was printed or returned."""
    fault = ""
    try:
        kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_PIDS)
        kernel.mount(
            "tmpfs", "/tmp", "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC, _TMP
        )
        os.chdir("/tmp")
    except OSError as error:
        fault = str(error)
    lines = socket.recv_fds(control, 1, 1)[1]
    control.close()
    if not lines:
        os._exit(_NOTHING_TO_RUN)
    line = socket.socket(fileno=lines[0])
    try:
        with line.makefile("rb") as reader:
            run = json.load(reader)
        if fault:
            raise OSError(fault)
        given, found = _streams(run.pop("stdin"))
        child = os.fork()
        if child == 0:
            _confine(ready, int(run["memory"]), math.ceil(run["cpu_seconds"]))
            _become(run, given, found, ready.prelude)
        status = _status(child, line, run["seconds"])
        output = os.pread(found, OUTPUT_BYTES, 0)
        line.sendall(json.dumps({"status": status, "size": len(output)}).encode() + b"\n" + output)
    except BaseException as error:  # noqa: BLE001  also of the child, while it is no program yet
        with contextlib.suppress(OSError):  # nobody listens
            line.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
    os._exit(0)


def _streams(stdin: str) -> tuple[int, int]:
    """Makes files in memory: one that is read and cannot be changed, and an empty one for what comes out."""
    given = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    with open(given, "wb", closefd=False) as file:
        file.write(stdin.encode("utf-8", "replace"))
    os.lseek(given, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(given, fcntl.F_ADD_SEALS, seals)
    return given, os.memfd_create("output")


def _status(child: int, line: socket.socket, seconds: float) -> int | None:
    """Returns the exit code, a signal as a negative one; None, and it is killed, after `seconds` or when nobody
    listens."""
    poll = select.poll()
    pidfd = os.pidfd_open(child)
    poll.register(pidfd, select.POLLIN)
    poll.register(line, 0)  # tells when the other side is closed
    late = pidfd not in [number for number, _ in poll.poll(1000 * seconds)]
    if late:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return None if late else os.waitstatus_to_exitcode(status)


def _confine(ready: _Ready, memory: int, cpu_seconds: int) -> None:
    """Gives up all rights of this process."""
    os.setsid()  # a signal to its group goes to nobody else
    limits = {
        resource.RLIMIT_AS: ready.size + memory,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: OUTPUT_BYTES,
        resource.RLIMIT_NPROC: _THREADS,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_SIGPENDING: _SIGNALS,
        **dict.fromkeys(
            (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE), 0
        ),
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        # the trainer's own, which only the machine's root may raise
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    kernel.drop_privileges(ready.user)
    kernel.end_with_parent()
    kernel.filter_calls(ready.calls)


def _become(run: dict[str, Any], given: int, found: int, prelude: types.CodeType) -> NoReturn:
    """Becomes the program: only its own streams are open, and 3 for what a function returns."""
    code = 1
    try:
        returns = run["fn_name"] is not None
        os.dup2(given, 0)
        os.dup2(found, 3 if returns else 1)  # 1 and 2 are /dev/null
        os.closerange(4 if returns else 3, _OPEN_FILES)
        streams = {"stdin": open(0), "stdout": open(1, "w"), "stderr": open(2, "w", buffering=1)}  # noqa: SIM115
        for name, stream in streams.items():
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        sys.argv = sys.orig_argv = ["program.py"]
        for name in [name for name in sys.modules if name.startswith("swift_r1")]:
            del sys.modules[name]
        random.seed(0)
        code = _ended(run, prelude)
    finally:
        os._exit(code)


def _ended(run: dict[str, Any], prelude: types.CodeType) -> int:
    """Runs the program, waits for its threads, calls what it registered; the exit code, 1 for an exception."""
    code = 0
    try:
        _execute(run, prelude)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  a program may raise anything
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None:
                stream.flush()
    except BaseException:  # noqa: BLE001
        code = code or 1
    return code & 0xFF


def _execute(run: dict[str, Any], prelude: types.CodeType) -> None:
    module = types.ModuleType("__main__" if run["fn_name"] is None else "solution")
    space = vars(module)
    sys.modules[module.__name__] = module
    code = compile(run["code"], "program.py", "exec", dont_inherit=True)
    if run["fn_name"] is not None:
        exec(prelude, space)  # noqa: S102  this process is there for it
    exec(code, space)  # noqa: S102
    if run["fn_name"] is not None:
        solution = space.get("Solution")
        function = (
            getattr(solution(), run["fn_name"]) if solution is not None else space[run["fn_name"]]
        )
        text = json.dumps(function(*run["args"]))
        with open(3, "w") as file:
            file.write(text)
