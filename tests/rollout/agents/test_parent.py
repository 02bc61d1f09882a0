"""The process that episodes are forked from: what a client needs is in it before the first of them begins."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys


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
