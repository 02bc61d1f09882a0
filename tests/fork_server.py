"""Starts Python programs without paying for their imports each time: a process that has them forks for each start.

`python -m tests.fork_server OWNER LISTENER`, two descriptors of sockets of `tests/forks.py`: it ends when the first hangs
up, and all processes that run tests connect to the second. Each message of theirs is a JSON object with
`words` (what follows `python`: `-P -m MODULE ...`, where `-P` may be left out, or `SCRIPT ...`), `cwd`, `environ` and
perhaps `prepare` (a module, a function and its arguments, called first). With it come four descriptors: stdin, stdout,
stderr, and one to which the exit code is written in the end (negative: the signal). The answer is the process id; the
process leads a session.

A program starts as from the command line, except that modules are there already. Where it would become another Python
program by `exec`, it runs that one in this process; torch's elastic launcher is replaced by forks, one per rank. Where
it starts one that imports torch (`swift forecast` its trainer), that one is forked from it. A run
draws no curves at its end, which would take longer than most runs of tests.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from swift_r1.errors import EXIT_LOST_PEER, EXIT_RUN_FAILED

MESSAGE_BYTES = 1 << 20
DESCRIPTORS = 4
ELASTIC, WORKER = "swift_r1.launch.elastic", "swift_r1.cli.rank"
FORKED = {
    "swift_r1": ("rlhf",),
    ELASTIC: (),
    WORKER: (),
    "swift_r1.rollout.agents.parent": (),
}
"""Modules that a program starts, and the commands of one that has several."""


def main(owner: socket.socket, listener: socket.socket) -> None:
    """Forks for all that connect, until the owner hangs up; in a child, does not return."""
    gc.disable()
    import_everything()
    gc.freeze()  # the collector does not write to what is shared
    gc.enable()
    with selectors.DefaultSelector() as selector:
        for one in (owner, listener):
            selector.register(one, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    pid, ended = key.data
                    _, status = os.waitpid(pid, 0)
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    with contextlib.suppress(BrokenPipeError), open(ended, "w") as pipe:
                        pipe.write(str(os.waitstatus_to_exitcode(status)))
                    continue
                if key.fileobj is owner:
                    return
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                    continue
                control = key.fileobj
                assert isinstance(control, socket.socket)
                message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, DESCRIPTORS)
                if not message:
                    selector.unregister(control)
                    control.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for other in list(selector.get_map().values()):
                        if isinstance(other.fileobj, socket.socket):
                            other.fileobj.close()
                        else:
                            os.close(other.fd)
                            os.close(other.data[1])
                    selector.close()
                    become(descriptors, **json.loads(message))
                for descriptor in descriptors[:-1]:
                    os.close(descriptor)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, descriptors[-1]))
                control.send(str(pid).encode())


IMPORTED_LATE = (
    *(
        "datasets",
        "deepspeed",
        "peft.tuners.lora",
        "transformers.models.llama.modeling_llama",
        "transformers.optimization",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.runtime.zero.muon.original_muon",
        "pandas",  # by pyarrow, for the first list that becomes a column
        "pyarrow.pandas_compat",
        "pyarrow.parquet",
        "torch.profiler",
    ),
    *("uvicorn.lifespan.off", "uvicorn.loops.auto", "uvicorn.protocols.http.auto"),
)


def import_everything() -> None:
    """All of our modules, without those for vLLM and Triton, and what a run of a tiny model imports late."""
    import swift_r1

    ours = [module.name for module in pkgutil.walk_packages(swift_r1.__path__, "swift_r1.")]
    for name in (*ours, *IMPORTED_LATE):
        if "vllm" not in name and not name.endswith(("__main__", "gpu_kernels")):
            importlib.import_module(name)
    # Hundreds of patterns, which each run compiles for the first model that it loads.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
    recorder = importlib.import_module("swift_r1.record.recorder")
    assert callable(recorder.draw_curves)
    recorder.draw_curves = lambda log, folder: None


def become(
    descriptors: list[int],
    words: list[str],
    cwd: str,
    environ: dict[str, str],
    prepare: list[Any] | None = None,
) -> NoReturn:
    os.setsid()
    for target, source in enumerate(descriptors[:3]):
        os.dup2(source, target)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(cwd)
    os.execve = in_place_of_exec
    subprocess._fork_exec = start_of(subprocess._fork_exec)
    if prepare is not None:
        module, function, *arguments = prepare
        getattr(importlib.import_module(module), function)(*arguments)
    run(words, environ)


def in_place_of_exec(path: str, argv: list[str], environ: dict[str, str]) -> NoReturn:
    assert path == sys.executable, path
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler
        )
    logging.root.handlers.clear()
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.name.startswith(("root", "swift_r1")):
            logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
    if argv[1:4] == ["-P", "-m", ELASTIC]:
        run_ranks(argv[4:], environ)
    run(argv[1:], environ)


def start_of(cold: Callable[..., int]) -> Callable[..., int]:
    """Returns what `subprocess` calls to start a program: a fork for those of `FORKED`, `cold` for others."""

    def start(
        argv: Sequence[str | bytes],
        executables: Sequence[bytes],
        close_fds: bool,
        kept: Sequence[int],
        cwd: str | None,
        environ: Sequence[bytes] | None,
        *more: Any,
    ) -> int:
        words = [os.fsdecode(word) for word in argv]
        commands = FORKED.get(words[3]) if words[:3] == [sys.executable, "-P", "-m"] else None
        if commands is None or (commands and words[4] not in commands):
            return cold(argv, executables, close_fds, kept, cwd, environ, *more)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                into, _, _, out, _, err, _, failed, _, new_session = more[:10]
                for target, source in enumerate((into, out, err)):
                    if source != -1:
                        os.dup2(source, target)
                gc.freeze()  # objects of what it comes from close nothing here
                for number in map(int, os.listdir("/proc/self/fd")):
                    if number > 2 and (number not in kept or number == failed):
                        with contextlib.suppress(OSError):
                            os.close(number)
                if new_session:
                    os.setsid()
                if cwd is not None:
                    os.chdir(cwd)
                prepare = more[-2]
                if prepare is not None:
                    prepare()
                signal.set_wakeup_fd(-1)
                resource_tracker._resource_tracker.__init__()
                atexit._clear()
                pairs = environ if environ is not None else map(b"=".join, os.environb.items())
                in_place_of_exec(
                    words[0], words, dict(os.fsdecode(pair).split("=", 1) for pair in pairs)
                )
            finally:  # what comes from the start itself
                traceback.print_exc()
                os._exit(1)
        return pid

    return start


def run_ranks(words: list[str], environ: dict[str, str]) -> NoReturn:
    """Ends with the code of the rank that failed first, and ends the others then."""
    size = int(environ["NPROC_PER_NODE"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    meeting |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    living = set()
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            run(
                ["-m", WORKER, *words],
                environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
        living.add(pid)
    code = 0
    while living:
        pid, status = os.wait()
        living.discard(pid)
        own = os.waitstatus_to_exitcode(status)
        if own and code in (0, EXIT_LOST_PEER):
            code = own
        if code not in (0, EXIT_LOST_PEER):
            for other in living:
                os.kill(other, signal.SIGKILL)
    os._exit(EXIT_RUN_FAILED if code < 0 else code)


def run(words: list[str], environ: dict[str, str]) -> NoReturn:
    """Runs a program to its end, and ends this process as Python would."""
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    code: Any = 0
    try:
        if "-m" in words[:2]:
            sys.argv = words[words.index("-m") + 1 :]
            if not hasattr(sys.modules.get(sys.argv[0]), "__path__"):
                sys.modules.pop(sys.argv[0], None)  # as for any program, its module is `__main__`
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001  as Python ends
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*(socket.socket(fileno=int(word)) for word in sys.argv[1:]))
