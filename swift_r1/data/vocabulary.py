"""The bytes of each token, so that tokens can be shown where the tokenizer is not."""

from __future__ import annotations

import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # SentencePiece's


def vocabulary_of(tokenizer: Any) -> list[tuple[bytes, bool]]:
    """Returns the UTF-8 bytes of each token id, from 0 on (of a part of a character some of its bytes), and whether it
    is a special token. A text's bytes are those of its tokens, one after another; decoders that strip its first space
    are not followed."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = (
        ""
        if backend is None or backend.decoder is None
        else backend.decoder.__getstate__().decode()
    )
    of_character = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    added = tokenizer.added_tokens_decoder

    def content(token: str | None) -> bytes:
        if token is None:  # an id that no token has
            return b""
        if "ByteLevel" in decoder:
            # else it is its own text, for the decoder too
            whole = of_character.keys() >= set(token)
            return bytes(of_character[one] for one in token) if whole else token.encode()
        byte = _BYTE.fullmatch(token)
        if byte:
            return bytes.fromhex(byte[1])
        return (
            token.replace(_SPACE, " ") if backend is None or _SPACE in decoder else token
        ).encode()

    tokens = tokenizer.convert_ids_to_tokens(range(1 + max(tokenizer.get_vocab().values())))
    return [
        (added[number].content.encode(), added[number].special)
        if number in added
        else (content(token), False)
        for number, token in enumerate(tokens)
    ]
