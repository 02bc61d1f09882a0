"""Models of known sizes: config.json files, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SMALL = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 8, "vocab_size": 10}
EIGHT_B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
EIGHT_B |= {
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
HUGE = EIGHT_B | {
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "intermediate_size": 53248,
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return folder_of(EIGHT_B, tmp_path / "eight")


def folder_of(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
