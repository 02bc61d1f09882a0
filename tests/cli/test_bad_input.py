"""Every fault of the user through the real command: exit code, one clear line, nothing heavy imported.

What is imported is seen where the command starts cold, once for each kind of fault.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import forks

REPO = Path(__file__).resolve().parents[2]
COUNTDOWN = str(REPO / "plugins" / "countdown.py")

# Runs the command and, however it ends, reports the heavy packages that were imported.
PROBE = """
import atexit, sys
heavy = ("torch", "transformers", "vllm", "deepspeed", "datasets")
atexit.register(lambda: print("HEAVY", *(name for name in heavy if name in sys.modules), file=sys.stderr))
from swift_r1.cli.main import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    lines: tuple[str, ...]
    heavy: tuple[str, ...]


def swift(
    *words: str, cwd: Path, environ: Mapping[str, str] | None = None, cold: bool = False
) -> Done:
    """Runs the command; only of one that starts `cold` are the `heavy` packages known."""
    if not cold:
        done = forks.run(["-m", "swift_r1", *words], cwd=cwd, timeout=120, environ=environ)
        return Done(done.returncode, done.stdout, said(done.stderr), ())
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", **(environ or {})},
    )
    before, _, probe = done.stderr.rpartition("HEAVY")
    assert probe, f"the command did not end by itself: {done.stderr}"
    return Done(done.returncode, done.stdout, said(before), tuple(probe.split()))


def said(text: str) -> tuple[str, ...]:
    """Leaves out what a machine that is busy says more."""
    return tuple(line for line in text.splitlines() if " rows prepared in " not in line)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model; nothing here may come so far as to load it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no weights
    return folder


@pytest.fixture
def good(model: Path) -> dict[str, str]:
    """Flags of a run that would start."""
    return {
        "rlhf_type": "grpo",
        "model": str(model),
        "external_plugins": COUNTDOWN,
        "dataset": "countdown#20",
        "reward_funcs": "external_countdown",
        "reward_isolation": "inline",
        "per_device_train_batch_size": "8",
    }


def words(flags: Mapping[str, str]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def rlhf(
    flags: Mapping[str, str],
    cwd: Path,
    environ: Mapping[str, str] | None = None,
    cold: bool = False,
) -> Done:
    return swift("rlhf", *words(flags), cwd=cwd, environ=environ, cold=cold)


def test_an_unknown_flag(good: dict[str, str], tmp_path: Path) -> None:
    done = rlhf(good | {"lerning_rate": "1e-6"}, tmp_path, cold=True)
    assert done.code == 2
    assert done.lines == ("swift rlhf: unknown flag --lerning_rate: did you mean --learning_rate?",)
    assert done.heavy == ()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"external_plugins": "gone.py"},
            "--external_plugins gone.py: there is no such file (looked in {cwd})",
        ),
        (
            {"external_plugins": "raises.py"},
            "plugin raises.py:2: ZeroDivisionError: division by zero",
        ),
        (
            {"reward_funcs": "external_countdwn"},
            "--reward_funcs: there is no reward function external_countdwn: did you mean external_countdown?",
        ),
        ({"dataset": "cuntdown"}, "unknown dataset cuntdown: "),
        ({"model": "models/gone"}, "--model models/gone"),
        ({"model": "./gone"}, "--model ./gone: there is no such folder (looked in {cwd})"),
        (
            {"model": "fp8"},
            "--model fp8 is stored quantized (fp8), which cannot be trained: save it in 16 bits first",
        ),
        ({"deepspeed": "gone.json"}, "--deepspeed gone.json: No such file or directory"),
        ({"output_dir": "raises.py/out"}, "--output_dir raises.py/out: "),
        (
            {"dataset": "rows.jsonl"},
            "--reward_funcs external_countdown needs the columns nums, target, which the data lacks (it has gold, ",
        ),
    ],
)
def test_bad_plugin_reward_data_model(
    good: dict[str, str], tmp_path: Path, change: dict[str, str], line: str
) -> None:
    (tmp_path / "raises.py").write_text("x = 0\n1 / x\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"query": "1 + 1?", "gold": "2"}) + "\n")
    (tmp_path / "empty").mkdir()
    shutil.copytree(good["model"], tmp_path / "fp8")
    config = {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    done = rlhf(good | change, tmp_path, cold=change == {"model": "models/gone"})
    assert done.code == 2
    assert len(done.lines) == 1, done.lines
    assert done.lines[0].startswith("swift rlhf: " + line.format(cwd=tmp_path))
    assert set(done.heavy) <= {"datasets"}, "which reads the rows"
    assert not (tmp_path / "output").exists(), "a run that cannot start left a folder"


def test_attention_heads_that_the_ranks_cannot_share(good: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text('{"num_attention_heads": 9}')
    change = {"deepspeed": "zero2", "sequence_parallel_size": "2"}
    done = rlhf(good | change, tmp_path, {"NPROC_PER_NODE": "2"})
    line = "swift rlhf: --sequence_parallel_size 2 does not divide the 9 attention heads of --model"
    assert done.code == 2 and done.lines[0].startswith(line)


def test_faults_of_rewards_data_and_model_come_together(
    good: dict[str, str], tmp_path: Path
) -> None:
    done = rlhf(good | {"reward_funcs": "nope", "dataset": "cuntdown", "model": "./gone"}, tmp_path)
    assert done.code == 2
    assert [line.split()[2] for line in done.lines] == ["--reward_funcs:", "unknown", "--model"]


def test_a_server_that_is_not_there(good: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        port = str(nobody.getsockname()[1])
        server = {"use_vllm": "true", "vllm_server_host": "127.0.0.1", "vllm_server_port": port}
        done = rlhf(good | server | {"vllm_server_timeout": "1"}, tmp_path)
    assert done.code == 3
    assert f"http://127.0.0.1:{port} was not ready within 1 s" in done.lines[-1]
    assert not (tmp_path / "output").exists()


@pytest.mark.long
def test_a_file_of_servers(good: dict[str, str], tmp_path: Path) -> None:
    flags = good | {
        "use_vllm": "true",
        "vllm_server_file": "servers.txt",
        "vllm_server_timeout": "1",
    }
    done = rlhf(flags | {"reward_funcs": "nope"}, tmp_path)
    assert done.code == 2 and len(done.lines) == 2
    file = tmp_path / "servers.txt"
    assert done.lines[1].endswith(
        f"--vllm_server_file {file} cannot be read: No such file or directory"
    )
    file.write_text("# ours\nhttp://127.0.0.1:9\ngen2:8000\n")
    done = rlhf(flags, tmp_path)
    assert done.code == 2
    [line] = done.lines
    assert line.endswith(f"{file}, line 3: 'gen2:8000' must begin with http:// or https://")
    file.write_text("# none yet\n")
    done = rlhf(flags, tmp_path, cold=True)
    assert done.code == 3 and "torch" not in done.heavy
    assert "(it names none)" in done.lines[-1]


def test_a_folder_that_holds_a_run(good: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logging.jsonl").write_text("")
    done = rlhf(good | {"output_dir": "run", "add_version": "false"}, tmp_path)
    assert done.code == 2
    assert done.lines[0].startswith(
        "swift rlhf: --output_dir run holds a run already (logging.jsonl)"
    )


def test_rollout_with_a_port_that_is_taken(model: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = swift("rollout", "--model", str(model), "--port", str(port), cwd=tmp_path, cold=True)
    assert done.code == 4
    assert done.lines == (
        f"swift rollout: port {port} of 127.0.0.1 is taken: another server listens there; give another --port",
    )
    assert done.heavy == ()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--model", "./gone"], "--model ./gone: there is no such folder"),
        (
            ["--model", "{model}", "--host", "0.0.0.0"],
            "--host 0.0.0.0 accepts connections from other machines: set --api_key",
        ),
        (
            ["--model", "{model}", "--host", "192.0.2.1", "--api_key", "k"],
            "cannot listen on 192.0.2.1 port 8000",
        ),
        (["--model", "{model}", "--port", "0"], "--port must be at least 1, not 0"),
        (
            ["--model", "{model}", "--infer_backend", "sglang"],
            "--infer_backend must be vllm, not 'sglang': generation",
        ),
    ],
)
def test_bad_rollout_flags(model: Path, tmp_path: Path, flags: list[str], line: str) -> None:
    done = swift("rollout", *(word.replace("{model}", str(model)) for word in flags), cwd=tmp_path)
    assert done.code == 2
    assert len(done.lines) == 1
    assert done.lines[0].startswith(f"swift rollout: {line}")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["merge-lora"], "swift merge-lora: --adapters is missing"),
        (
            ["eval", "--model", "gone", "--benchmarks", "gsm8k"],
            "swift eval: --model gone: there is no such folder",
        ),
        (["rolout"], "swift rolout: unknown command 'rolout': did you mean `swift rollout`?"),
        (
            ["rlhf", "--model", "m", "--dataset", "d", "--reward_funcs", "a"],
            "swift rlhf: --rlhf_type is missing: grpo or ppo",
        ),
        (
            ["check", "--registered", "--external_plugins", "gone.py"],
            "swift check: --external_plugins gone.py: there is no such file",
        ),
    ],
)
def test_bad_commands(tmp_path: Path, command: list[str], line: str) -> None:
    done = swift(*command, cwd=tmp_path, cold=command[0] in ("merge-lora", "eval", "check"))
    assert done.code == 2
    assert done.lines[0].startswith(line)
    assert done.heavy == ()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["pt", "--model", "m"], marks=pytest.mark.long),
        ["rlhf", "--rlhf_type", "gkd"],
        pytest.param(["rlhf", "--rlhf-type=kto"], marks=pytest.mark.long),
    ],
)
def test_what_ms_swift_does_is_handed_over(tmp_path: Path, command: list[str]) -> None:
    """Without it one line says how to install it; another package named swift does not count."""
    (tmp_path / "swift").mkdir()
    (tmp_path / "swift" / "__init__.py").write_text("")
    done = swift(*command, cwd=tmp_path, environ={"PYTHONPATH": f"{REPO}:{tmp_path}"}, cold=True)
    if done.code == 2 and done.lines[0].endswith("pip install 'ms-swift>=4.6,<5'"):
        return
    pytest.skip("ms-swift is installed here")


def test_ms_swift_is_run_by_module(tmp_path: Path) -> None:
    package = tmp_path / "swift" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "main.py").write_text(
        "import sys; print('real', *sys.argv[1:]); print('HEAVY', file=sys.stderr)"
    )
    metadata = tmp_path / "ms_swift-4.6.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ms-swift\nVersion: 4.6.0\n")
    (metadata / "RECORD").write_text("swift/cli/main.py,,\n")
    done = swift(
        "pt", "--model", "m", cwd=tmp_path, environ={"PYTHONPATH": f"{tmp_path}:{REPO}"}, cold=True
    )
    assert done.code == 0
    assert done.out == "real pt --model m\n"
