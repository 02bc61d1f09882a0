"""What the processes that `swift` turns into are given: flags, ranks, keys, environment. Stand-ins print it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]

STAND_IN = """
import json, os, pathlib, sys
given = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
print("STARTED " + json.dumps({"pid": os.getpid(), "file": sys.argv[1], "given": given, "environ": dict(os.environ)}))
"""

START = """
import sys
import swift_r1.launch.environment, swift_r1.cli.rollout
swift_r1.launch.environment.WORKER_MODULE = swift_r1.cli.rollout.SERVER_MODULE = "stand_in"
from swift_r1.cli.main import main
sys.exit(main())
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no weights
    return folder


def start(folder: Path, *words: str, **environ: str) -> tuple[dict[str, Any], str]:
    """What the stand-in was given, and stderr."""
    (folder / "stand_in.py").write_text(STAND_IN)
    base = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LD_PRELOAD", "OMP_NUM_THREADS")
    }
    process = subprocess.Popen(
        [sys.executable, "-c", START, *words],
        cwd=folder,
        env={**base, "PYTHONPATH": f"{REPO}:{folder}", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("STARTED ")]
    started = json.loads(line.removeprefix("STARTED "))
    assert started["pid"] == process.pid, "signals would not reach the process that works"
    return {**started, "out": out}, err


def test_the_server_gets_flags_key_and_environment(model: Path, tmp_path: Path) -> None:
    words = [
        "rollout",
        "--model",
        str(model),
        "--port",
        "18431",
        "--api_key",
        "hidden",
        "--max_model_len",
        "64",
    ]
    words += ["--torch_dtype", "float32"]  # or some CPUs have a line about the dtype
    started, err = start(tmp_path, *words, CUDA_VISIBLE_DEVICES="")
    assert started["given"]["args"]["max_model_len"] == 64
    assert started["given"]["args"]["port"] == 18431
    assert "hidden" not in json.dumps(started["given"])
    assert started["file"].startswith("/proc/self/fd/"), "a file would be left behind"
    assert started["environ"]["SWIFT_API_KEY"] == "hidden"
    assert started["environ"]["HF_HUB_OFFLINE"] == "1"
    (line,) = err.splitlines()
    assert line.startswith("environment: ")


def test_the_trainer_gets_its_rank_and_the_run_folder(model: Path, tmp_path: Path) -> None:
    words = [
        "--rlhf_type",
        "grpo",
        "--model",
        str(model),
        "--external_plugins",
        str(REPO / "plugins" / "countdown.py"),
    ]
    words += [
        "--dataset",
        "countdown#20",
        "--reward_funcs",
        "format",
        "--per_device_train_batch_size",
        "8",
    ]
    started, err = start(tmp_path, "rlhf", *words, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    environ, given = started["environ"], started["given"]
    assert [environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "1"]
    assert environ["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in err, "what the user set is not ours to announce"
    assert Path(given["run_dir"]).parent == tmp_path / "output" / "model"
    assert started["file"] == str(Path(given["run_dir"]) / "args.json")
    assert f"run folder: {given['run_dir']}" in started["out"]
    assert "20 prompts" in started["out"]
