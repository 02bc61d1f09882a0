"""The tokenizer that vLLM, which loads one itself, is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from swift_r1.models.loading import load_tokenizer
from swift_r1.serving.engines.vllm_start import _give_tokenizer
from tests.models.test_loading import PROBES, TEXT, byte_level, write


def test_vllm_loads_what_the_file_says(tmp_path: Path) -> None:
    file = byte_level()
    write(tmp_path, file, tokenizer_class="LlamaTokenizerFast", chat_template="{{ messages }}")
    arguments: dict[str, Any] = {"model": str(tmp_path)}
    _give_tokenizer(arguments, load_tokenizer(str(tmp_path)))
    # as vLLM does
    loaded = AutoTokenizer.from_pretrained(arguments["tokenizer"])
    for text in PROBES:
        ids = file.encode(text, add_special_tokens=False).ids
        assert loaded.encode(text, add_special_tokens=False) == ids
        assert loaded.decode(ids) == file.decode(ids, skip_special_tokens=False)
    assert loaded.chat_template == "{{ messages }}" and loaded.eos_token == "<|im_end|>"

    given = {"model": str(tmp_path), "tokenizer": "the user's"}
    _give_tokenizer(given, load_tokenizer(str(tmp_path)))
    assert given["tokenizer"] == "the user's"


def test_vllm_loads_the_models_own_where_its_class_fits(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), tokenizer_class="PreTrainedTokenizerFast")
    arguments: dict[str, Any] = {"model": str(tmp_path)}
    _give_tokenizer(arguments, load_tokenizer(str(tmp_path)))
    assert arguments == {"model": str(tmp_path)}
    assert AutoTokenizer.from_pretrained(tmp_path).tokenize(TEXT)
