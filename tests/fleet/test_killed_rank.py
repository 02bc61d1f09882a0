"""What the trainer's own launcher tells `swift launch`, and nobody else, of a rank that a signal killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_r1.errors import EXIT_RANK_KILLED, EXIT_RUN_FAILED
from swift_r1.runtime.stopping import LAUNCHED
from tests import forks

SCRIPT = """
import sys
from swift_r1.flags import World
from swift_r1.launch.elastic import run_workers
worker = f"import os, signal, sys, time; {sys.argv[1]} if os.environ['RANK'] == '1' else time.sleep(60)"
sys.exit(run_workers(World(nproc_per_node=2), (sys.executable, "-c", worker)))
"""


@pytest.mark.parametrize(
    ("end", "launched", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", True, EXIT_RANK_KILLED),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)", False, EXIT_RUN_FAILED, marks=pytest.mark.long
        ),
        pytest.param("sys.exit(5)", True, EXIT_RUN_FAILED, marks=pytest.mark.long),
    ],
)
def test_exit_code(tmp_path: Path, end: str, launched: bool, code: int) -> None:
    (tmp_path / "run.py").write_text(SCRIPT)
    environ = {LAUNCHED: "1"} if launched else {}
    done = forks.run(["run.py", end], cwd=tmp_path, environ=environ, timeout=120)
    assert done.returncode == code
