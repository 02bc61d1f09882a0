"""Stateful sandboxes a second, and what is left of those that are killed: `python benchmarks/sandboxes.py`.

Starts, forks and commands a second, one after another and from a thread per core; 200 at once, with the memory that they
take; 500 of which each is killed at a random moment in one of five ways, with what is left of processes, mounts, folders
and open files.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from swift_r1.sandboxes.base import SandboxError, SandboxLimits, SandboxSpec
from swift_r1.sandboxes.local import sandbox
from swift_r1.sandboxes.local.sandbox import LocalSandbox, open_local

LIMITS = SandboxLimits(processes=64, memory_bytes=512 << 20, disk_bytes=64 << 20)
SPEC = SandboxSpec(limits=LIMITS)
CORES = len(os.sched_getaffinity(0))
WORK = "mkdir -p a && cd a && seq 100 > b && cp b c && rm b"
# seconds that nothing else sleeps: what carries them is found wherever it is
MARK = os.environ.setdefault("SANDBOXES_MARK", f"1000.{os.getpid()}")
DAEMONS = f"""
trap '' TERM
(setsid sleep {MARK} &)
(sleep {MARK} &)
head -c 3000000 /dev/zero > x
sleep {MARK}
"""
MANY = """
import sys, time
from swift_r1.sandboxes.local.sandbox import open_local
from sandboxes import DAEMONS, SPEC
import threading
boxes = [open_local(SPEC) for _ in range(10)]
for box in boxes:
    threading.Thread(target=box.exec, args=(DAEMONS, 1000), daemon=True).start()
print(flush=True)
time.sleep(1000)
"""


def rate(what: str, count: int, work: Callable[[], object], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        done = [pool.submit(work) for _ in range(count)]
        for one in done:
            one.result()
        seconds = time.perf_counter() - started
    how = "one after another" if threads == 1 else f"from {threads} threads"
    print(f"{what}, {how}: {count / seconds:.0f}/s", flush=True)


def start_and_end() -> None:
    open_local(SPEC).close()


def own_boxes() -> Callable[[], LocalSandbox]:
    """Returns what gives each thread a sandbox of its own."""
    kept = threading.local()

    def own() -> LocalSandbox:
        if not hasattr(kept, "box"):
            kept.box = open_local(SPEC)
        return kept.box

    return own


def rates(count: int) -> None:
    for threads in (1, CORES):
        rate("starts with their ends", count, start_and_end, threads)
    for threads in (1, CORES):
        own = own_boxes()
        rate("forks with their ends", count, lambda own=own: own().fork().close(), threads)
    for threads in (1, CORES):
        own = own_boxes()
        rate("commands (true)", 4 * count, lambda own=own: own().exec("true", 20), threads)
    for threads in (1, CORES):
        own = own_boxes()
        rate("commands with 4 programs", count, lambda own=own: own().exec(WORK, 20), threads)
    box = open_local(SPEC)
    for size in (1 << 10, 1 << 20):
        content = bytes(size)
        rate(
            f"files of {size >> 10} KiB",
            count,
            lambda content=content: box.write_file("f", content),
            1,
        )
    box.close()


def memory_of(processes: list[psutil.Process]) -> float:
    """Returns the MiB of memory that they have, counting once what they share."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def inside() -> list[psutil.Process]:
    """Returns the first process inside, the rootfs, the supervisors and all that is in sandboxes."""
    first = psutil.Process(sandbox._machine()._inner.pid)
    return [first, *first.children(recursive=True)]


def at_once(count: int) -> None:
    started = time.perf_counter()
    with ThreadPoolExecutor(CORES) as pool:
        boxes = list(pool.map(lambda _: open_local(SPEC), range(count)))
    opened = time.perf_counter() - started
    with ThreadPoolExecutor(count) as pool:
        started = time.perf_counter()
        done = list(pool.map(lambda box: box.exec(f"{WORK}; sleep 1000 & echo ok", 120), boxes))
        worked = time.perf_counter() - started
    assert {one.output for one in done} == {"ok\n"}
    processes = inside()
    print(
        f"{count} at once: open in {opened:.1f} s, a command with 5 programs in each in {worked:.1f} s; "
        f"{len(processes)} processes, {memory_of(processes) / count:.1f} MiB each",
        flush=True,
    )
    started = time.perf_counter()
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(lambda box: box.close(), boxes))
    print(f"ended in {time.perf_counter() - started:.1f} s", flush=True)


def marked() -> int:
    """Returns how many processes of the machine are what DAEMONS begins."""
    found = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            found += MARK.encode() in Path(f"/proc/{name}/cmdline").read_bytes()
    return found


def left(folder: Path) -> dict[str, int]:
    """Counts what sandboxes might leave."""
    first = inside()
    return {
        "processes inside": len(first),
        "processes of commands": marked(),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "files and folders": sum(1 for _ in folder.rglob("*")),
        "open files": len(os.listdir("/proc/self/fd"))
        + sum(len(os.listdir(f"/proc/{process.pid}/fd")) for process in first),
        "threads": threading.active_count(),
    }


def parents() -> dict[int, int]:
    """Returns the parent of each process inside."""
    found = {}
    for process in inside():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = process.ppid()
    return found


def kill_one(random_: random.Random) -> str:
    """Opens a sandbox, lets it work, and kills something of it in the middle. Returns what."""
    before = parents()
    box = open_local(SPEC)
    # the supervisor has a parent that was there before; its first child is the sandbox's first process
    mine = {pid: above for pid, above in parents().items() if pid not in before}
    supervisor = next(pid for pid, above in mine.items() if above in before)
    first = next(pid for pid, above in mine.items() if above == supervisor)
    working = threading.Thread(target=work_until_killed, args=(box,), daemon=True)
    working.start()
    time.sleep(random_.random() * 0.1)
    way = random_.choice(("supervisor", "first process", "any process", "closed"))
    mine = {pid: above for pid, above in parents().items() if pid not in before}
    with contextlib.suppress(ProcessLookupError):
        if way == "supervisor":
            os.kill(supervisor, signal.SIGKILL)
        elif way == "first process":
            os.kill(first, signal.SIGKILL)
        elif way == "any process":
            os.kill(random_.choice(list(mine)), signal.SIGKILL)
    box.close()
    working.join(30)
    return way


def work_until_killed(box: LocalSandbox) -> None:
    with contextlib.suppress(SandboxError):
        box.exec(DAEMONS, 1000)


def killed(count: int, seed: int) -> bool:
    """Returns whether nothing is left."""
    random_ = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        os.environ["TMPDIR"] = os.environ["SWIFT_R1_CACHE"] = name
        start_and_end()
        before = left(Path(name))
        ways: dict[str, int] = {}
        started = time.perf_counter()
        for _ in range(count * 4 // 5):
            way = kill_one(random_)
            ways[way] = ways.get(way, 0) + 1
        for _ in range(count // 50):  # whose own process is killed, ten at a time
            here = Path(__file__).parent
            outer = subprocess.Popen([sys.executable, "-c", MANY], stdout=subprocess.PIPE, cwd=here)
            assert outer.stdout is not None and outer.stdout.readline() == b"\n"
            below = psutil.Process(outer.pid).children(recursive=True)
            time.sleep(random_.random() * 0.2)
            below += psutil.Process(outer.pid).children(recursive=True)
            outer.kill()
            outer.communicate()
            assert not psutil.wait_procs(below, timeout=30)[1], "processes outlive their starter"
            ways["the starter"] = ways.get("the starter", 0) + 10
        seconds = time.perf_counter() - started
        deadline = time.monotonic() + 10
        after = left(Path(name))
        while after != before and time.monotonic() < deadline:  # the kernel's own cleaning up
            time.sleep(0.1)
            after = left(Path(name))
    print(f"{sum(ways.values())} killed in {seconds:.0f} s: {ways}")
    for what, number in before.items():
        print(f"  {what}: {number} before, {after[what]} after")
    return after == before


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="starts, forks, commands")
    parser.add_argument("--at_once", type=int, default=200)
    parser.add_argument("--killed", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    start_and_end()
    if flags.count:
        rates(flags.count)
    if flags.at_once:
        at_once(flags.at_once)
    clean = not flags.killed or killed(flags.killed, flags.seed)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
