"""How trainer and server know that they mean the same tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Protocol


class HasVocabulary(Protocol):
    def get_vocab(self) -> Mapping[str, int]: ...


def tokenizer_hash(tokenizer: HasVocabulary) -> str:
    """SHA-256 (hex) over the sorted vocabulary, added tokens included, so any class that loads it agrees."""
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True).encode()).hexdigest()
