"""The bytes of tokens: those of a text's tokens, one after another, are the text's."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from swift_r1.data.vocabulary import vocabulary_of

TEXT = "Höhe: 3 * 4 = 12,  größer\n\tals 🦊 ▁ <0x41> <|end|>"


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT[:12]] * 9, trainers.BpeTrainer(vocab_size=265, initial_alphabet=alphabet)
    )
    return tokenizer


def byte_fallback():
    """As Llama 2's: bytes for unknown characters, `▁` for spaces."""
    tokens = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"Höhe:3*4=12,grßals",
        "\u2581=",
    ]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("\u2581", "=")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def test_a_token_outside_of_the_byte_alphabet_is_its_own_text():
    """As the decoder of byte-level tokenizers takes it."""
    backend = Tokenizer(models.WordLevel({"\u0120a": 0, "\u20ac b": 1}, unk_token="\u20ac b"))
    backend.decoder = decoders.ByteLevel()
    found = vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [backend.decode([number]).encode() for number in (0, 1)] == [b" a", "\u20ac b".encode()]
    assert found == [(b" a", False), ("\u20ac b".encode(), False)]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_tokens_are_the_texts(make):
    backend = make()
    backend.add_tokens([AddedToken(" größer", normalized=False)])
    backend.add_special_tokens(["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    found = vocabulary_of(tokenizer)
    assert len(found) == len(tokenizer)
    text = TEXT if make is byte_level else TEXT.replace("\u2581", "").replace("<0x41>", "")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert b"".join(found[one][0] for one in ids) == text.encode()
    assert [number for number, (_, special) in enumerate(found) if special] == [
        tokenizer.convert_tokens_to_ids("<|end|>")
    ]
    assert (" größer".encode(), False) in found
