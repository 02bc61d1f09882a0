"""`python scripts/gpu/marked.py [vllm]`: the tests marked `gpu` that need no vLLM, or with `vllm` those that do; in a
rehearsal they are only collected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shapes import REHEARSES

ROOT = Path(__file__).resolve().parents[2]
NEED_VLLM = ("tests/e2e/test_colocate.py", "tests/serving/test_sleep.py")


def main() -> int:
    marked = [
        file
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in file.read_text()
    ]
    wants = "vllm" in sys.argv[1:]
    files = [str(file) for file in marked if (str(file.relative_to(ROOT)) in NEED_VLLM) == wants]
    words = ["--collect-only"] if REHEARSES else ["-rA"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", *words, *files]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
