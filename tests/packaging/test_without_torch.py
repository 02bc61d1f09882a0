"""What `pip install swift-r1` gives without the extra `cpu` or `gpu`: everything that loads no model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_r1.cli.main import LOAD_MODELS
from swift_r1.errors import EXIT_OK, EXIT_USAGE
from swift_r1.runtime.libraries import GET_VLLM

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec
missing = set("MISSING".split())
PathFinder.find_spec = lambda name, *rest: None if name in missing else found(name, *rest)
"""
ALL = "torch transformers accelerate peft deepspeed vllm openai"
PLUGIN = (
    "--external_plugins",
    "plugins/countdown.py",
    "--dataset",
    "countdown",
    "--reward_funcs",
    "external_countdown",
)


def swift(tmp_path: Path, *words: str, missing: str = ALL) -> subprocess.CompletedProcess[str]:
    # for the processes of rewards too
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.replace("MISSING", missing))
    return subprocess.run(
        [sys.executable, "-m", "swift_r1", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.long
def test_a_plugin_is_written_and_checked(tmp_path: Path) -> None:
    for words in (
        ("init", "countdown"),
        ("init", "maths", "new"),
        ("check", *PLUGIN),
    ):
        done = swift(tmp_path, *words)
        assert done.returncode == EXIT_OK, done.stderr
    assert "all good" in done.stdout


@pytest.mark.long
def test_an_agent_is_written_and_its_check_says_what_to_install(tmp_path: Path) -> None:
    done = swift(tmp_path, "init", "agent", "new")
    assert done.returncode == EXIT_USAGE
    assert (
        "the package openai, of which agents get a client: pip install 'swift-r1[agents]'"
        in done.stdout
    )
    assert {one.name for one in (tmp_path / "new").iterdir()} - {"__pycache__"} == {
        "data.jsonl",
        "plugin.py",
        "run.yaml",
    }


@pytest.mark.parametrize(
    "words",
    [
        *(
            pytest.param((name,), marks=() if name == "rlhf" else pytest.mark.long)
            for name in LOAD_MODELS
        ),
        ("check", *PLUGIN, "--model", "."),
    ],
    ids=" ".join,
)
def test_what_loads_models_says_what_to_install(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "plugins").symlink_to(ROOT / "plugins")
    (tmp_path / "config.json").write_text("{}")
    done = swift(tmp_path, *words)
    assert done.returncode == EXIT_USAGE, done.stderr
    assert (
        "is not installed: pip install 'swift-r1[cpu]'" in done.stderr
        and done.stderr.count("\n") == 1
    )


def test_a_server_without_vllm_ends_at_once(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    done = swift(tmp_path, "rollout", "--model", ".", missing="vllm")
    assert done.returncode == EXIT_USAGE, done.stderr
    assert (
        f"swift rollout: vLLM is not installed: {GET_VLLM}" in done.stderr
        and "Traceback" not in done.stderr
    )
