"""Tokenizers whose class in tokenizer_config.json is not that of their tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from swift_r1.errors import UsageError
from swift_r1.models.loading import load_tokenizer

TEXT = "we need to add 9 and 6\nnow: it's 1234567 apples"
PROBES = (
    TEXT,
    "  two  spaces\n\n\tand a tab ",
    "Grüße, 世界, नमस्ते, 1² ½ Ａ e\u0301 \u00a0\u2028🙂",
    "a<|im_end|> b <|im_end|>\n",
    "x" * 30 + "12345678 ,.;!?()[]{}",
)
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
CLASSES = (
    "LlamaTokenizerFast",
    "LlamaTokenizer",
    "GemmaTokenizerFast",
    "Qwen2Tokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizerFast",
    "BertTokenizer",
    "ByT5Tokenizer",
    "PreTrainedTokenizer",
    "PreTrainedTokenizerFast",
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=names))


def trained(tokenizer: Tokenizer, trainer: trainers.BpeTrainer) -> Tokenizer:
    tokenizer.train_from_iterator([TEXT, *TEXT.split()] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in set(SPECIAL.values())])
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, **config: object) -> None:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL | config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_a_tokenizer_is_what_its_file_says(tmp_path: Path, make: object) -> None:
    assert callable(make)
    file: Tokenizer = make()
    for name in CLASSES:
        for family in ("llama", "qwen2"):
            write(tmp_path, file, tokenizer_class=name, chat_template="{{ messages }}")
            (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
            loaded = load_tokenizer(str(tmp_path))
            for text in PROBES:
                ids = file.encode(text, add_special_tokens=False).ids
                assert loaded.encode(text, add_special_tokens=False) == ids, (name, text)
                assert loaded.decode(ids) == file.decode(ids, skip_special_tokens=False), name
            assert loaded.get_vocab() == file.get_vocab(), name
            assert {one: getattr(loaded, one) for one in SPECIAL} == SPECIAL
            assert loaded.chat_template == "{{ messages }}"


def test_a_class_that_fits_is_kept_with_its_special_tokens(tmp_path: Path) -> None:
    file = byte_level()
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.add_special_tokens(["<|endoftext|>"])
    write(tmp_path, file)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert load_tokenizer(str(tmp_path)).eos_token == "<|endoftext|>"

    # and those that the config leaves to a class that does not fit
    file = byte_level()
    file.add_special_tokens(["<|endoftext|>"])
    file.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.eos_token == "<|endoftext|>"
    assert loaded.get_vocab() == file.get_vocab()


def test_a_class_that_cannot_be_built_is_refused_in_a_line(tmp_path: Path) -> None:
    for name in ("T5Tokenizer", "PhobertTokenizer", "BartphoTokenizer"):
        write(tmp_path, byte_level(), tokenizer_class=name)
        with pytest.raises(UsageError, match=r"^cannot load the tokenizer of --model [^\n]+$"):
            load_tokenizer(str(tmp_path))
