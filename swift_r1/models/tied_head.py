"""Whether a model's files hold the output head that its config tells of.

transformers, ZeRO-3, vLLM and adapters each make another model of a head that is not the embedding where the config says
that it is.
"""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from swift_r1.models.multimodal import stored_tensors

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_EMBEDDING = re.compile(r"(emb\w*|wte)\.weight$")
_ROWS = 1024  # compared at a time


def second_head(model: str) -> str | None:
    """Says that the files of a model (a folder or id) whose config ties the output head to the embedding hold another
    head; None where they do not, and where they are not here or cannot be read, which the loader tells."""
    try:
        stored = stored_tensors(model)
        head = min(filter(_HEAD.search, stored), key=len, default=None)
        embeddings = [name for name in stored if _EMBEDDING.search(name) and name != head]
        if head is None or all(_are_equal(stored, head, one) is not False for one in embeddings):
            return None
    except (OSError, SafetensorError):
        return None
    return (
        "its config.json says that the output head is the embedding (tie_word_embeddings true), and its files have "
        f"another {head}: set it to false there, or remove {head}"
    )


def _are_equal(stored: dict[str, Path], head: str, embedding: str) -> bool | None:
    """Compares two weights, and reads no more of them than is needed; None where their shapes differ: it is an embedding
    of something else than tokens."""
    import torch

    with safe_open(stored[head], "pt") as file, safe_open(stored[embedding], "pt") as other:
        one, two = file.get_slice(head), other.get_slice(embedding)
        shape = one.get_shape()
        if shape != two.get_shape():
            return None
        return all(
            torch.equal(one[row : row + _ROWS].float(), two[row : row + _ROWS].float())
            for row in range(0, shape[0], _ROWS)
        )
