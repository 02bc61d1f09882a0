"""`python scripts/gpu/marked.py`: the tests marked `gpu`; in a rehearsal they are only collected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shapes import REHEARSES

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in file.read_text()]
    words = ["--collect-only"] if REHEARSES else []
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", *words, *files]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
