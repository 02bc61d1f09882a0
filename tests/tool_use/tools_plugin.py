"""Tools that work, fail, hang, and answer with more than they should; each in a worker process."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

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
    raise ConnectionError(f"the search\nengine is away\n{how}")


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
tools |= {"add": add, "echo": echo, "fails": fails, "hangs": hangs, "meets": meets, "secret": secret}
