"""Tools that work, fail, hang, and answer with more than they should; each in a worker process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from swift_r1 import orms, tools


def add(a: float, b: float) -> float:
    """Adds two numbers."""
    return a + b


async def echo(text: str, times: int = 1) -> str:
    """Says it again.

    Args:
        text: what to say
        times: how often
    """
    return text * times


def fails(how: str) -> Any:
    """Fails in some way."""
    if how == "dies":
        os.kill(os.getpid(), 9)
    if how == "exits":
        raise SystemExit(0)
    if how == "memory":
        return bytes(1 << 34)
    if how == "lock":
        import threading

        return threading.Lock()
    if how == "closes":
        sys.stdout.close()
        return ""
    if how == "half":
        return "a\ud800"
    if how == "speechless":
        raise Speechless
    raise ConnectionError(f"the search\nengine is away\n{how}")


class Speechless(Exception):
    def __str__(self) -> str:
        raise AttributeError("text")


Way = Literal["on", "back"]


def moves(way: Way, by: tuple[int, int]) -> list[int]:
    """Moves."""
    return [one if way == "on" else -one for one in by]


def leaves(folder: str) -> str:
    """Says where it is, and goes elsewhere."""
    here = os.getcwd()
    os.chdir(folder)
    return here


def hoards() -> str:
    """Opens all files that it can."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    with suppress(OSError):
        while True:
            _kept.append(os.open(os.devnull, os.O_RDONLY))
    return "all"


_kept: list[int] = []


def forks() -> str:
    """Has a second process return from it."""
    child = os.fork()
    return "1" if child == 0 else "0"


def hangs(seconds: float, folder: str) -> str:
    """Waits, with a process of its own."""
    child = subprocess.Popen(["sleep", "600"])
    Path(folder, f"{os.getpid()}").write_text(str(child.pid))
    time.sleep(seconds)
    return "done"


def meets(folder: str, who: str, other: str) -> str:
    """Waits for another call that runs at the same time."""
    Path(folder, who).touch()
    while not Path(folder, other).exists():
        time.sleep(0.01)
    return "met"


def secret(name: str) -> str | None:
    """A variable of the environment."""
    return os.environ.get(name)


def right(
    completions: list[str], total: list[str], num_turns: list[int], tool_calls: list[Any], **_: Any
) -> list[float]:
    """1 for the total, and a tenth for each call."""
    assert all(len(made) >= turns - 1 for made, turns in zip(tool_calls, num_turns, strict=True))
    return [
        float(said == wanted) + len(made) / 10
        for said, wanted, made in zip(completions, total, tool_calls, strict=True)
    ]


orms["right"] = right
tools |= {
    "add": add,
    "echo": echo,
    "fails": fails,
    "hangs": hangs,
    "meets": meets,
    "secret": secret,
}
tools |= {"forks": forks, "hoards": hoards, "leaves": leaves, "moves": moves}
