"""Runs parts one after another, each with a log and a deadline, and leaves none of its processes behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from parts import Part

SKIPPED = 77  # a part's exit code: it cannot run here, and its last line says why
GRACE_S = 5.0
_MARK = "SWIFT_R1_GPU_PART"


@dataclass(frozen=True)
class Machine:
    """What parts run on; `python` is for those that are Python files."""

    python: str
    root: Path
    environ: Mapping[str, str]
    gpus: int


@dataclass
class Outcome:
    """`state` is passed, failed, timed out, killed, skipped or not run; `why` a line, `tail` the end of the log."""

    state: str
    seconds: float = 0.0
    why: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)


class Listener(Protocol):
    """What is told of each part."""

    def add(self, part: Part, outcome: Outcome, log: str = "") -> None: ...


def run_parts(
    parts: Sequence[Part],
    machine: Machine,
    budget_s: float,
    report: Listener,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """All that the budget has room for; a part that does not pass ends none of the others."""
    end = now() + budget_s
    for part in parts:
        left, log = end - now(), ""
        if left < part.seconds:
            outcome = Outcome(
                "not run",
                why=f"{max(left, 0):.0f} s of the budget left, and it takes about {part.seconds:.0f}",
            )
        elif why := why_not(part, machine):
            outcome = Outcome("skipped", why=why)
        else:
            print(
                f"{part.name}: {part.what} (at most {min(part.limit_s, left):.0f} s) ...",
                flush=True,
            )
            outcome, log = run_part(part, machine, min(part.limit_s, left))
        print(
            f"{part.name}: {outcome.state} {outcome.seconds:.0f} s {outcome.why}".rstrip(),
            flush=True,
        )
        report.add(part, outcome, log)


def why_not(part: Part, machine: Machine) -> str | None:
    """Why a part cannot run on this machine; None where it can be tried."""
    if part.gpus > machine.gpus:
        return (
            f"it needs {part.gpus} GPU{'s' * (part.gpus > 1)}, and this machine has {machine.gpus}"
        )
    if not part.packages:
        return None
    code = f"from importlib.util import find_spec; print(*(n for n in {part.packages!r} if find_spec(n) is None))"
    try:
        done = subprocess.run(
            [machine.python, "-c", code],
            env=machine.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{machine.python} does not run: {error}"
    if done.returncode:
        return f"{machine.python} does not run: {done.stderr.strip()[-200:]}"
    missing = done.stdout.split()
    return f"not installed: {', '.join(missing)}" if missing else None


def run_part(part: Part, machine: Machine, limit_s: float) -> tuple[Outcome, str]:
    """Returns how it went and what it wrote, of which lines `RESULT {...}` are its figures."""
    with tempfile.TemporaryDirectory(prefix="swift-r1-gpu-") as folder:
        log = Path(folder, "log")
        outcome = _run_part(part, machine, limit_s, log)
        return outcome, log.read_text(encoding="utf-8", errors="replace")


def _run_part(part: Part, machine: Machine, limit_s: float, log: Path) -> Outcome:
    mark = uuid.uuid4().hex
    words = [str(machine.root / part.command[0]), *part.command[1:]]
    started = time.monotonic()
    timed_out, process = False, None
    try:  # from before it starts: a signal may come at any time
        with log.open("wb") as out:
            process = subprocess.Popen(
                [machine.python, *words] if words[0].endswith(".py") else words,
                cwd=machine.root,
                env={**machine.environ, _MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        timed_out, code = True, 0
        _send(signal.SIGTERM, mark)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:  # after Ctrl-C too
        end = time.monotonic() + GRACE_S
        # again: one may have started another meanwhile
        while _send(signal.SIGKILL, mark) and time.monotonic() < end:
            time.sleep(0.02)
        if process is not None:
            process.kill()  # before it has its variables it is not found by them
            # a signal may have broken into a wait, which then holds its lock for ever
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    outcome = Outcome("passed", time.monotonic() - started, figures=_figures(lines))
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if timed_out:
        outcome.state, outcome.why = (
            "timed out",
            f"killed after {limit_s:.0f} s; its last line: {last[-200:]}",
        )
    elif code == SKIPPED:
        outcome.state, outcome.why = "skipped", last[-300:]
    elif code < 0:
        outcome.state, outcome.why = (
            "killed",
            f"by {signal.Signals(-code).name}; its last line: {last[-200:]}",
        )
    elif code:
        outcome.state, outcome.why = "failed", f"exit code {code}: {last[-300:]}"
    if outcome.state not in ("passed", "skipped"):
        outcome.tail = lines[-30:]
    return outcome


def _figures(lines: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in lines:
        with suppress(ValueError):  # cut off, or another process wrote into it
            found |= json.loads(line.removeprefix("RESULT ")) if line.startswith("RESULT {") else {}
    return found


def _send(number: signal.Signals, mark: str) -> int:
    """To all processes that the part has started, also those in sessions of their own: engines are. How many live."""
    count = 0
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        # Gone meanwhile, or somebody else's.
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), number)
                count += 1
    return count
