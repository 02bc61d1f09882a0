"""The examples of the page HTTP of the site work, one after another, on a real server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import ServerProcess, wait_until_serving

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "reference"))

from http_page import page


def test_the_examples_of_the_page_work(
    start_tiny: Callable[..., ServerProcess], tiny_model: Path
) -> None:
    server = start_tiny(tiny_model)
    wait_until_serving(server)
    examples = re.findall(r"```bash\n(.*?)```", page(), re.DOTALL)
    assert len(examples) > 20
    said = (
        "".join(examples)
        .replace("models/smollm2-135m", str(tiny_model))
        .replace("localhost:8000", server.url[7:])
    )
    script = "set -eux -o pipefail\n" + said.replace("curl -s", "curl --fail-with-body -sS")
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
