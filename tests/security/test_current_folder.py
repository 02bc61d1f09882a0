"""Nothing in the folder that a command runs in is imported, by none of the processes that it starts."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO
from tests.plugins.tools import mcp_program

PLUGIN = REPO / "tests" / "e2e" / "digits_plugin.py"
LIBRARIES = "accelerate cpuinfo deepspeed mcp numpy peft psutil rich torch transformers triton uvicorn vllm yaml"
TAKEN = "taken"
SMALL = (
    *("--rlhf_type", "grpo", "--external_plugins", str(PLUGIN), "--dataset", "counting#8"),
    *("--reward_funcs", "digits", "--max_completion_length", "8", "--num_generations", "4"),
    *("--per_device_train_batch_size", "4", "--report_to", "none"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One with a file for each module of the library, and of others; they say who has imported them."""
    for name in (*sys.stdlib_module_names, *LIBRARIES.split(), "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(
            f"import posix\nposix.write(posix.open({TAKEN!r}, 1025 | 64, 0o600), b'{name} by %d\\n' % posix.getpid())\n"
            f"raise ImportError('{name} of the current folder')\n"
        )
    return tmp_path


def swift(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("swift")), *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=280,
    )
    print(done.stdout, done.stderr)
    taken = folder / TAKEN
    assert not taken.exists(), taken.read_text()
    return done


def servers(folder: Path) -> str:
    entry = {"command": sys.executable, "args": [mcp_program.__file__], "tools": ["count"]}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"one": entry}}))
    return str(folder / "servers.json")


def test_what_a_check_starts(folder: Path) -> None:
    """Workers of rewards, their host and Python's trackers; an MCP server with what ends it."""
    words = ["--external_plugins", str(PLUGIN), "--dataset", "counting#3"]
    done = swift(
        folder, "check", *words, "--reward_funcs", "digits", "--mcp_servers", servers(folder)
    )
    assert done.returncode == 0


def test_python_m(folder: Path) -> None:
    """Where a person types this, Python has begun with its own library in that folder; ours takes nothing else there."""
    for name in sys.stdlib_module_names:
        (folder / f"{name}.py").unlink()
    words = [
        "-m",
        "swift_r1",
        "check",
        "--external_plugins",
        str(PLUGIN),
        "--reward_funcs",
        "digits",
    ]
    assert subprocess.run([sys.executable, *words], cwd=folder, timeout=100).returncode == 0
    assert not (folder / TAKEN).exists()


@pytest.mark.long
def test_a_reward_sees_its_own_folder(tmp_path: Path) -> None:
    """A plugin imports what lies beside it, and what it starts is as it would be elsewhere."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "beside_it.py").write_text("VALUE = 0.5\n")
    (plugins / "program.py").write_text("import beside_it\nprint(beside_it.VALUE)\n")
    (plugins / "own.py").write_text(
        "import os, subprocess, sys\nimport beside_it\nfrom swift.rewards import ORM, orms\n"
        "assert 'PYTHONSAFEPATH' not in os.environ\n"
        "class Own(ORM):\n"
        "    def __call__(self, completions, **kwargs):\n"
        "        said = subprocess.check_output([sys.executable, os.path.dirname(__file__) + '/program.py'])\n"
        "        return [float(said) + beside_it.VALUE for _ in completions]\n"
        "orms['own'] = Own\n"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "solution": "a"}) + "\n")
    words = ["--external_plugins", str(plugins / "own.py"), "--dataset", "rows.jsonl"]
    done = swift(tmp_path, "check", *words, "--reward_funcs", "own", "--json")
    assert done.returncode == 0
    assert "1.0" in done.stdout


@pytest.mark.long
def test_an_environment_may_lie_there(folder: Path) -> None:
    """One that is named: what is imported from there is what no library has."""
    for name in {file.stem for file in folder.glob("*.py")}:
        if find_spec(name) is None:
            (folder / f"{name}.py").unlink()
    (folder / "own_env.py").write_text(
        "class Env:\n"
        "    def reset(self, **row): return 'count'\n"
        "    def count(self, by: int) -> str:\n"
        '        """Counts.\n\n        Args:\n            by: how far.\n        """\n'
        "        return str(by)\n"
    )
    done = swift(folder, "check", "--env", "trl:own_env:Env", "--reward_funcs", "format")
    assert "own_env:Env" in done.stdout + done.stderr and "No module named" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("processes", ["1", "2"])
def test_what_a_training_starts(folder: Path, tiny_model: Path, processes: str) -> None:
    sizes = ["--max_steps", "2", "--output_dir", str(folder / "run"), "--view", "true"]
    words = ["rlhf", "--model", str(tiny_model), *SMALL, *sizes]
    assert swift(folder, *words, NPROC_PER_NODE=processes).returncode == 0


@pytest.mark.long
def test_what_a_launch_starts(folder: Path, tiny_model: Path) -> None:
    """An agent, vLLM's server with its engine, and what vLLM starts by `python -m` to look at a model."""
    flags: dict[str, Any] = {
        word[2:]: value for word, value in zip(SMALL[::2], SMALL[1::2], strict=True)
    }
    flags |= {"model": str(tiny_model), "max_steps": 2, "output_dir": str(folder / "run")}
    flags |= {"torch_dtype": "float32"}
    own = {"torch_dtype": "float32", "vllm_engine_kwargs": '{"kv_cache_memory_bytes": 67108864}'}
    run = {"rlhf": flags, "rollout": own, "roles": {"train": {}, "rollout": {}}}
    (folder / "run.yaml").write_text(json.dumps(run))
    done = swift(folder, "launch", "run.yaml", VLLM_CACHE_ROOT=str(folder / "cache"))
    assert done.returncode == 0


def test_every_start_says_so() -> None:
    """Whoever names an interpreter has `module_words` behind it, or `-P`."""
    starts = 0
    for path in (REPO / "swift_r1").rglob("*.py"):
        text = path.read_text()
        if '"-m"' not in text and "sys.executable" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and node.value == "-m":
                assert path.name == "processes.py" and path.parent.name == "runtime", path
            if not isinstance(node, ast.List | ast.Tuple) or len(node.elts) < 2:
                continue
            first, second = map(ast.unparse, node.elts[:2])
            if first == "sys.executable" and not second.startswith("str(FILES"):
                assert second in ("'-P'", "*words") or "_words(" in second, f"{path}: {second}"
                starts += 1
    assert starts > 15  # it has found them
