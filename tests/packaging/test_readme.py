"""What the README shows is what the code takes: its plugin runs, the flags of its commands parse."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from swift_r1.arguments import RlhfArguments, RolloutArguments, parse_arguments

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

USE_PLUGIN = """
import sys
from swift_r1.arguments import RlhfArguments, parse_arguments
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


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(name: str) -> list[list[str]]:
    """The flags of each `swift <name>` command in the README's shell blocks."""
    words = [shlex.split(block.replace("\\\n", " ")) for block in blocks("bash")]
    return [argv[argv.index(name) + 1 :] for argv in words if name in argv]


def test_the_plugin_runs(tmp_path: Path) -> None:
    (plugin,) = blocks("python")
    assert len([line for line in plugin.splitlines() if line]) <= 20
    (tmp_path / "sums.py").write_text(plugin)
    subprocess.run([sys.executable, "-c", USE_PLUGIN, tmp_path / "sums.py"], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("argv", commands("rlhf"), ids=["cpu", "gpu"])
def test_the_training_commands_parse(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    args = parse_arguments(RlhfArguments, argv)
    assert args.reward_funcs == ["external_countdown", "format"]
    assert args.external_plugins == ["plugins/countdown.py"]


@pytest.mark.parametrize("argv", commands("rollout"), ids=["cpu", "gpu"])
def test_the_server_commands_parse(argv: list[str]) -> None:
    assert parse_arguments(RolloutArguments, argv).port == 8000


def test_every_make_target_in_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    mentioned = set(re.findall(r"`?make ([a-z0-9-]+)", README))
    assert {"demo", "demo-server", "test", "install", "smollm2"} <= mentioned
    assert mentioned <= set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))


def test_every_file_to_start_with_exists() -> None:
    section = README.split("## Start with these files")[1].split("\n## ")[0]
    for path in re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE):
        assert (ROOT / path).exists(), path
