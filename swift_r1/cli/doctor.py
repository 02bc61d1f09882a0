"""`swift doctor`: what this machine and installation can do, one line per finding, with advice where there is any.

Each check returns a finding; libraries that may break at import are imported in processes of their own, with a
deadline.
"""

from __future__ import annotations

import glob
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_r1.errors import EXIT_OK, EXIT_USAGE, UsageError
from swift_r1.launch.environment import find_allocator, has_gpu
from swift_r1.runtime.hardware import cpu_multiplies, usable_cpus
from swift_r1.runtime.libraries import GET_VLLM, missing_for_vllm, package_versions
from swift_r1.sandboxes.base import SandboxError, SandboxSpec

IMPORT_SECONDS = 180
PORTS = (8000, 29500)
_GIB = 2**30
HELP = (
    """swift doctor

Says what this machine and installation can do: versions, devices, memory, limits, ports, and whether DeepSpeed, vLLM
and the allocator work here. Takes up to a minute. Exit code 0 if training can run, 2 if something is broken.""",
)


@dataclass(frozen=True, slots=True)
class Examined:
    """`state` is `ok`, `warning` (slower, or something is missing) or `broken`; `advice` says what to do about it."""

    name: str
    state: str
    text: str
    advice: str = ""

    def line(self) -> str:
        return f"{self.state:<8} {self.name}: {self.text}" + (
            f"; {self.advice}" if self.advice else ""
        )


def _found(name: str, good: bool, text: str, advice: str) -> Examined:
    return Examined(name, "ok", text) if good else Examined(name, "warning", text, advice)


def run(words: Sequence[str]) -> int:
    """Runs the command, which takes no flags."""
    if words:
        raise UsageError(f"swift doctor takes no flags: {' '.join(words)}")
    states = []
    for finding in examine():
        print(finding.line(), flush=True)
        states.append(finding.state)
    broken = states.count("broken")
    warnings = states.count("warning")
    print(
        f"{len(states) - broken - warnings} ok, {warnings} warning{'s' * (warnings != 1)}, {broken} broken"
    )
    return EXIT_USAGE if broken else EXIT_OK


def examine() -> Iterator[Examined]:
    """Yields all findings, in the order in which they are looked for."""
    yield versions()
    yield devices()
    yield processors()
    yield shared_memory(shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield disk(Path.cwd())
    yield from (port(number) for number in PORTS)
    yield allocator(find_allocator())
    yield sandboxes()
    if has_gpu(os.environ):
        yield compiler(
            shutil.which("cc") or shutil.which("gcc"),
            Path(sysconfig.get_path("include"), "Python.h"),
        )
    yield library("deepspeed", "needed for --deepspeed: pip install deepspeed")
    missing = missing_for_vllm()
    if missing:
        yield Examined("vllm", "broken", missing)
    else:
        use = f"needed for `swift rollout`, else completions come from the trainer (--use_vllm false): {GET_VLLM}"
        yield library("vllm", use)


def versions() -> Examined:
    installed = package_versions()
    missing = [name for name in ("torch", "transformers", "datasets") if name not in installed]
    text = ", ".join(f"{name} {number}" for name, number in installed.items())
    if missing:
        return Examined(
            "versions",
            "broken",
            text,
            f"{', '.join(missing)} not installed: pip install 'swift-r1[cpu]' (or [gpu])",
        )
    return Examined("versions", "ok", text)


def devices() -> Examined:
    """GPUs that torch can use, against the device files."""
    names_of = "[torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]"
    code, output = _python(f"import torch; print({names_of})")
    if code:
        return Examined("torch", "broken", _last_line(output), "reinstall torch for this machine")
    names = output.strip().splitlines()[-1]
    if names == "[]" and has_gpu(os.environ):
        files = ", ".join(sorted(glob.glob("/dev/nvidia[0-9]*")))
        return Examined(
            "devices",
            "warning",
            f"torch sees no GPU, but there is {files}",
            "install a torch built for CUDA, or a driver that is new enough for it",
        )
    return Examined(
        "devices", "ok", "no GPU, everything runs on the CPU" if names == "[]" else names
    )


def processors() -> Examined:
    pages = os.sysconf("SC_PHYS_PAGES")
    size = os.sysconf("SC_PAGE_SIZE")
    text = f"{len(usable_cpus())} usable, {pages * size / _GIB:.0f} GiB of memory"
    if cpu_multiplies("bfloat16"):
        return Examined("processors", "ok", text)
    return Examined(
        "processors",
        "ok",
        f"{text}; no bfloat16 instructions, so models of 16 bits compute in float32",
    )


def shared_memory(free: int) -> Examined:
    """Looks at the memory that data loader workers and other processes of one machine share."""
    text = f"{free / _GIB:.1f} GiB free in /dev/shm"
    return _found("shared memory", free >= _GIB, text, "in a container give it more: --shm-size=8g")


def open_files(limit: int) -> Examined:
    unlimited = limit == resource.RLIM_INFINITY
    text = f"at most {'unlimited' if unlimited else limit}"
    return _found("open files", unlimited or limit >= 4096, text, "raise it: ulimit -n 65536")


def sandboxes() -> Examined:
    """Looks whether programs of a model can be run: by `code`, and in the sandboxes of the tool `shell`."""
    from swift_r1.sandboxes.local.sandbox import open_local

    try:
        with open_local(SandboxSpec()) as box:
            users = "1 user" if box.exec("chown 1 .", 10).exit_code else "65,536 users"
    except SandboxError as error:
        return Examined("sandboxes", "warning", str(error), "needed for `code` and `--tools shell`")
    return Examined("sandboxes", "ok", f"in namespaces of this machine, with {users}")


def disk(folder: Path) -> Examined:
    free = shutil.disk_usage(folder).free
    text = f"{free / _GIB:.0f} GiB free in {folder}"
    advice = "a checkpoint takes 14 bytes per parameter: --save_total_limit keeps few"
    return _found("disk", free >= 10 * _GIB, text, advice)


def port(number: int) -> Examined:
    """Says whether a server could listen on it at 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            use = (
                "swift rollout --port" if number == PORTS[0] else "MASTER_PORT (several nodes only)"
            )
            return Examined(
                f"port {number}", "warning", error.strerror or str(error), f"choose another: {use}"
            )
    return Examined(f"port {number}", "ok", "free")


def allocator(path: str | None) -> Examined:
    """Looks for an allocator: on a CPU memory traffic limits the speed."""
    if path is None:
        advice = "twice to four times slower on a CPU: install libtcmalloc-minimal4 or libjemalloc2"
        return Examined("allocator", "warning", "neither tcmalloc nor jemalloc", advice)
    code, output = _python("pass", LD_PRELOAD=path)
    if code or "LD_PRELOAD" in output:
        return Examined(
            "allocator",
            "warning",
            f"{path} cannot be preloaded: {_last_line(output)}",
            "reinstall it",
        )
    return Examined("allocator", "ok", path)


def compiler(path: str | None, header: Path) -> Examined:
    """Looks for a C compiler: Triton, without which vLLM generates nothing on a GPU, makes launchers with it that
    include `header`."""
    missing = [
        what for what, there in (("C compiler", path), (str(header), header.is_file())) if not there
    ]
    advice = "vLLM needs it on a GPU: apt-get install gcc libc6-dev python3-dev"
    return _found(
        "compiler", not missing, f"no {' and no '.join(missing)}" if missing else str(path), advice
    )


def library(name: str, use: str) -> Examined:
    """Says whether it can be imported, tried in a process of its own."""
    code, output = _python(f"import {name}; print({name}.__version__)")
    if code == 0:
        return Examined(name, "ok", f"{output.strip().splitlines()[-1]} can be imported")
    if f"No module named '{name}'" in output:
        return Examined(name, "warning", "not installed", use)
    return Examined(name, "broken", f"cannot be imported: {_last_line(output)}", use)


def _python(code: str, **environ: str) -> tuple[int, str]:
    """Returns the exit code and output of a new Python that runs `code`."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
            env={**os.environ, **environ},
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {IMPORT_SECONDS} s"
    return done.returncode, done.stdout


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip() or "no output"
