"""`import swift_r1` is a plugin author's world, and costs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

import swift_r1

REPO = Path(__file__).resolve().parents[2]


def test_all_public_names_are_there() -> None:
    for name in swift_r1.__all__:
        assert getattr(swift_r1, name) is not None
    with pytest.raises(AttributeError, match="nope"):
        _ = swift_r1.nope


def test_the_names_load_nothing_heavy() -> None:
    code = (
        "import sys, swift_r1, swift_r1.flags, swift_r1.plugins, swift_r1.cli.rlhf, swift_r1.cli.rollout\n"
        "[getattr(swift_r1, name) for name in swift_r1.__all__]\n"
        "heavy = {'torch', 'transformers', 'vllm', 'deepspeed', 'datasets', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
