"""The tokenizer of a written model: the files of its source, as other versions of transformers read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from swift_r1.cli.main import main
from swift_r1.data.prompts import Wording, tokenizer_of_run
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.models.loading import load_model, load_tokenizer
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.checkpoint.saving import CRITIC, Saver
from swift_r1.training.optimizer import OptimizerConfig
from tests.conftest import CHAT_TEMPLATE, save_tiny_model

RANKS = Ranks(0, 1, torch.device("cpu"), None)
LORA = AdapterArguments(train_type="lora", lora_rank=2, lora_alpha=4, target_modules=["q_proj"])
SCALING = {"rope_type": "linear", "factor": 4.0}


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A folder as transformers 4 wrote it."""
    folder = save_tiny_model(tmp_path / "older", tied=False)
    (folder / "chat_template.jinja").unlink()
    about = json.loads((folder / "tokenizer_config.json").read_text())
    for name in ("backend", "is_local", "local_files_only"):
        about.pop(name, None)
    about |= {"tokenizer_class": "LlamaTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=4))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "tokenizer.model").write_bytes(b"\x0a\x00")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5e5, "rope_scaling": SCALING}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")


def backend_of(folder: Path, lora: AdapterArguments | None) -> LocalBackend:
    return LocalBackend(
        load_model(folder, None, False, lora), OptimizerConfig(1e-3, 0.0, 0.9, 0.95, 1e-8, 1.0)
    )


def saved(folder: Path, tokenizer: Any, run: Path, lora: AdapterArguments | None = None) -> Path:
    backend = backend_of(folder, lora)
    critic = None if lora else backend_of(folder, None)
    run.mkdir()
    Saver(run, backend, None, tokenizer, RANKS, None, False, critic=critic).save(1, None, {}, True)
    return run / "checkpoint-1"


def same_files(source: Path, folder: Path) -> None:
    for name in NAMES:
        assert (folder / name).read_bytes() == (source / name).read_bytes(), name
    assert not (folder / "chat_template.jinja").exists()


def test_checkpoints_and_merged_models_are_read_by_transformers_4(
    older: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of_run(load_tokenizer(str(older)), Wording())
    checkpoint = saved(older, tokenizer, tmp_path / "full")
    adapters = saved(older, tokenizer, tmp_path / "lora", LORA)
    same_files(older, adapters)
    assert (
        main(["merge-lora", "--adapters", str(adapters), "--output_dir", str(tmp_path / "m")]) == 0
    )
    for folder in (checkpoint, checkpoint / CRITIC, tmp_path / "m"):
        same_files(older, folder)
        config = json.loads((folder / "config.json").read_text())
        assert (config["rope_theta"], config["rope_scaling"]) == (5e5, SCALING)
        assert config["rope_parameters"] == {"rope_theta": 5e5, **SCALING}
        assert load_tokenizer(str(folder)).get_vocab() == tokenizer.get_vocab()


def test_a_changed_template_alone_replaces_the_sources(older: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of_run(load_tokenizer(str(older)), Wording(system="Be brief."))
    checkpoint = saved(older, tokenizer, tmp_path / "full")
    assert load_tokenizer(str(checkpoint)).chat_template == tokenizer.chat_template != CHAT_TEMPLATE
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template == tokenizer.chat_template
    before, after = (json.loads((one / NAMES[1]).read_text()) for one in (older, checkpoint))
    assert before.pop("chat_template") == CHAT_TEMPLATE and before == after
    assert (checkpoint / NAMES[0]).read_bytes() == (older / NAMES[0]).read_bytes()


def test_adapters_alone_name_the_class_that_their_models_config_implies(
    older: Path, tmp_path: Path
) -> None:
    """No config.json is beside them."""
    (older / NAMES[1]).write_text('{"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}')
    tokenizer = load_tokenizer(str(older))
    checkpoint = saved(older, tokenizer, tmp_path / "lora", LORA)
    assert load_tokenizer(str(checkpoint)).get_vocab() == tokenizer.get_vocab()
