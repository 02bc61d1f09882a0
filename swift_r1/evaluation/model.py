"""The model folder under test: what it is made of, told without loading it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_OWN_FILES = frozenset((".safetensors", ".bin", ".json", ".model", ".jinja", ".txt"))
_ADAPTER = "adapter_config.json"


def base_of(model: str) -> str | None:
    """The base model of a folder of adapters (a checkpoint of `--train_type lora`); None for a whole model."""
    path = Path(model).expanduser() / _ADAPTER
    return str(json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]) if path.is_file() else None


def model_sha256(model: str) -> str:
    """Of the names and contents of a model's own files, in order; of adapters, those of the base model too."""
    folder = _folder_of(model)
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _OWN_FILES:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
    if (base := base_of(model)) is not None:
        digest.update(f"base {model_sha256(base)}\n".encode())
    return digest.hexdigest()


def _folder_of(model: str) -> Path:
    """The folder itself, or that of a Hugging Face id in the hub's cache, where the check of `--model` has put it."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))
