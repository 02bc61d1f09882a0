"""The files of a tokenizer, as another folder gets them: other versions of transformers read none but its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift_r1.models.multimodal import folder_of

_CONFIG = "tokenizer_config.json"
_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates/*.jinja"


def tokenizer_files(tokenizer: Any, alone: bool = False) -> dict[str, bytes]:
    """Returns the files of a tokenizer, by their names: those of the folder that it was loaded from, byte for byte. A
    chat template that it has got since then replaces theirs.

    Args:
        alone: they go where no config.json is, by which transformers knows the class of one that does not name it.
    """
    found = stored_files(folder_of(tokenizer.name_or_path))
    config = own = json.loads(found.get(_CONFIG, b"{}"))
    if alone:
        own = {"tokenizer_class": type(tokenizer).__name__} | own
    loaded = tokenizer.init_kwargs.get("chat_template")
    if isinstance(loaded, list):
        loaded = {one["name"]: one["template"] for one in loaded}
    template = tokenizer.chat_template
    if template != loaded:
        own = {name: value for name, value in own.items() if name != "chat_template"}
        found = {name: content for name, content in found.items() if ".jinja" not in name}
        texts = template if isinstance(template, dict) else {"default": template}
        for name, text in texts.items():
            found[_TEMPLATE if name == "default" else _TEMPLATES.replace("*", name)] = text.encode()
    if own != config:
        found[_CONFIG] = (json.dumps(own, indent=2, ensure_ascii=False) + "\n").encode()
    return found


def stored_files(folder: Path) -> dict[str, bytes]:
    """Returns the files of the tokenizer in a folder, by their names there."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for pattern in (*_FILES, _TEMPLATE, _TEMPLATES)
        for path in folder.glob(pattern)
    }


def write_tokenizer(files: dict[str, bytes], folder: Path) -> None:
    """Writes these files to a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
