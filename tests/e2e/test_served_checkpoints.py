"""`--adapters` of `swift rollout`: what cannot be served is said in a line before anything starts, and what can is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swift_r1.cli.main import main
from swift_r1.cli.merge_lora import merged_folder
from swift_r1.errors import UsageError
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.models.loading import load_model
from tests.conftest import free_port


def save_adapters(model: Path, folder: Path) -> Path:
    """Adapters over `model` that change what it says, as a checkpoint has them."""
    loaded: Any = load_model(
        model,
        "float32",
        False,
        AdapterArguments(
            train_type="lora", lora_rank=4, lora_alpha=16, target_modules=["all-linear"]
        ),
    )
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapters(tiny_model, tmp_path_factory.mktemp("run") / "checkpoint-3")


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where merged models are made."""
    folder = tmp_path / "room"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def fault(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["rollout", "--port", str(free_port()), *words]) == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("swift rollout: ")
    ]
    return line


def test_what_cannot_be_served(
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    adapters: Path,
    save_model: Any,
    room: Path,
    tmp_path: Path,
) -> None:
    wide = save_model(tmp_path / "wide", hidden_size=128, num_attention_heads=4)
    deep = save_adapters(
        save_model(tmp_path / "deep", num_hidden_layers=3), tmp_path / "deep-adapters"
    )
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    (nameless / "adapter_model.safetensors").touch()
    (nameless / "adapter_config.json").write_text("{}")
    assert "holds no adapters" in fault(capsys, "--adapters", str(tiny_model))
    assert "does not say which model is under it" in fault(capsys, "--adapters", str(nameless))
    assert "no such folder" in fault(
        capsys, "--adapters", str(adapters), "--model", str(tmp_path / "nowhere")
    )
    line = fault(capsys, "--adapters", str(adapters), "--model", str(wide))
    assert f"are not of --model {wide}: " in line and "[128, 128]" in line
    line = fault(capsys, "--adapters", str(deep), "--model", str(tiny_model))
    assert line.endswith("it has no model.layers.2.mlp.down_proj")
    assert "leave one out" in fault(
        capsys, "--adapters", str(adapters), "--vllm_enable_lora", "true"
    )
    assert "--model is missing" in fault(capsys)
    assert list(room.iterdir()) == []


def test_folders_of_dead_servers_are_removed(tiny_model: Path, adapters: Path, room: Path) -> None:
    (room / "swift-r1-merged-4194305-x").mkdir()  # above the highest process number
    mine = merged_folder(adapters, str(tiny_model), os.environ)
    assert list(room.iterdir()) == [mine]
    assert merged_folder(adapters, str(tiny_model), os.environ) != mine and mine.exists()
    with pytest.raises(UsageError, match="cannot be merged"):
        merged_folder(adapters, str(tiny_model), os.environ | {"TMPDIR": str(room / "none")})


@pytest.mark.long
def test_adapters_are_served_merged(
    launch_server: Any, tiny_model: Path, adapters: Path, room: Path
) -> None:
    """What the merged model says in transformers, in the run's template, up to its stop token."""
    server = launch_server(tiny_model, adapters=adapters, torch_dtype="float32")
    assert httpx.get(f"{server.url}/info", trust_env=False).json()["model"] == str(adapters)
    (merged,) = room.glob("swift-r1-merged-*")
    check_chat(server.url, str(adapters), merged)
    server.stop()
    assert not list(room.glob("swift-r1-merged-*"))


def check_chat(url: str, name: str, folder: Path) -> None:
    """Greedily what the model of `folder` says; sampled, some answers end at the stop token, which is not shown."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "start at 3"}]
    asked = {"model": name, "messages": messages, "max_tokens": 12, "temperature": 0}
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=asked, trust_env=False, timeout=60
    ).json()
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        said = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    choice = answer["choices"][0]
    assert choice["message"]["content"] == tokenizer.decode(said, skip_special_tokens=True)
    asked |= {"temperature": 1.0, "n": 64, "seed": 1, "max_tokens": 200}
    many = httpx.post(
        f"{url}/v1/chat/completions", json=asked, trust_env=False, timeout=120
    ).json()["choices"]
    reasons = {one["finish_reason"] for one in many}
    assert "stop" in reasons and not any(
        tokenizer.eos_token in one["message"]["content"] for one in many
    )
