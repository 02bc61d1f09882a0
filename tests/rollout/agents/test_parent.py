"""The process that episodes are forked from: what a client needs is in it before the first of them begins."""

from __future__ import annotations

import json
import resource
import select
import socket
import subprocess
import sys
from pathlib import Path


def test_a_trainer_that_goes_before_it_has_read_everything() -> None:
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-m", "swift_r1.rollout.agents.parent", str(theirs.fileno())]
    parent = subprocess.Popen(words, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()], text=True)
    theirs.close()
    order = {"plugins": [], "agent": None, "command": ["true"], "memory": 1.0, "kept": []}
    ours.sendall(json.dumps(order).encode() + b"\n")
    assert json.loads(ours.recv(1 << 16)) == {"ready": True}
    ours.sendall(json.dumps({"begin": 1, "environ": {}, "row": {}}).encode() + b"\n")
    assert select.select([ours], [], [], 60)[0]  # how it ended; nobody reads that
    ours.close()
    _, said = parent.communicate(timeout=60)
    assert (parent.returncode, said) == (0, "")


def test_an_episode_that_cannot_be_watched_leaves_nothing() -> None:
    """All its files fit but the last, which watches the process."""
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-m", "swift_r1.rollout.agents.parent", str(theirs.fileno())]
    with subprocess.Popen(words, pass_fds=[theirs.fileno()]) as parent, ours:
        theirs.close()
        order = {
            "plugins": [],
            "agent": None,
            "command": ["sleep", "60"],
            "memory": 1.0,
            "kept": [],
        }
        ours.sendall(json.dumps(order).encode() + b"\n")
        assert json.loads(ours.recv(1 << 16)) == {"ready": True}
        about = Path(f"/proc/{parent.pid}")
        before = sorted(int(one.name) for one in (about / "fd").iterdir())
        free = [number for number in range(100) if number not in before]
        hard = resource.prlimit(parent.pid, resource.RLIMIT_NOFILE)[1]
        # three pipes and the row
        resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, (free[7], hard))
        ours.sendall(json.dumps({"begin": 1, "environ": {}, "row": {}}).encode() + b"\n")
        assert "Too many open files" in json.loads(ours.recv(1 << 16))["raised"]
        assert sorted(int(one.name) for one in (about / "fd").iterdir()) == before
        assert (about / f"task/{parent.pid}/children").read_text() == ""
