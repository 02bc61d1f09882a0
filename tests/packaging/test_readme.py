"""The README's plugin runs, and is as short as it says a plugin is. Its commands: tests/docs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

USE_PLUGIN = """
import sys
from swift_r1.flags import RlhfArguments, parse_arguments
from swift_r1.data.loading import load_rows
from swift_r1.plugins import load_plugins
from swift_r1.rewards import orms

flags = "--rlhf_type grpo --model . --per_device_train_batch_size 8 --dataset sums#20 --reward_funcs last_number"
args = parse_arguments(RlhfArguments, [*flags.split(), "--external_plugins", sys.argv[1]])
load_plugins(args.external_plugins)
rows = load_rows(args.data_flags).train
assert len(rows) == 20, len(rows)
solutions = [row["solution"] for row in rows]
a, b = map(int, rows[0]["messages"][-1]["content"].split("?")[0].removeprefix("What is ").split(" + "))
assert solutions[0] == str(a + b)
reward = orms["last_number"]()
assert reward([f"12 and then {s}." for s in solutions], solution=solutions) == [1.0] * 20
assert reward([f"{s}, no: 0" for s in solutions], solution=solutions) == [0.0] * 20
"""


def test_the_plugin_runs(tmp_path: Path) -> None:
    (plugin,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len([line for line in plugin.splitlines() if line]) <= 20
    (tmp_path / "sums.py").write_text(plugin)
    subprocess.run(
        [sys.executable, "-c", USE_PLUGIN, tmp_path / "sums.py"], cwd=ROOT, check=True, timeout=60
    )
