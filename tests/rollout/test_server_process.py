"""What the server refuses before it loads a model."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from swift_r1.errors import EXIT_PORT_TAKEN, EXIT_USAGE


def run_server(folder: Path, **args: Any) -> subprocess.CompletedProcess[str]:
    (folder / "args.json").write_text(json.dumps({"args": args}))
    command = [sys.executable, "-m", "swift_r1.rollout.server", str(folder / "args.json")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_taken_port_is_exit_4_before_the_model_loads(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run_server(tmp_path, model="no-such-model", port=port)
    assert done.returncode == EXIT_PORT_TAKEN
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr


def test_an_open_address_needs_a_key(tmp_path: Path) -> None:
    done = run_server(tmp_path, model="no-such-model", host="0.0.0.0", port=0)
    assert done.returncode == EXIT_USAGE and "--api_key" in done.stderr
