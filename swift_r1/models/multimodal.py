"""Multimodal checkpoints (`...ForConditionalGeneration`): transformers' own class, with its towers where a run has
images, else as a text model.

Without images what is not the language model (vision, audio, projectors) is never in memory. It stays in the checkpoint's
files, from which a new checkpoint gets a copy.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from safetensors import safe_open

if TYPE_CHECKING:
    from torch import nn

NEVER = -1e4
"""The logit of a token that is never sampled: its probability is 0, and 0 times it is a number."""
# without chat_template.json, an older file that would hide the template of training, which is with the tokenizer
_PROCESSOR = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")
_TOWER = re.compile(r"(^|\.)(visual|vision_\w+|multi_modal_projector|connector|embed_vision)\.")
_ALIGNER = re.compile(r"(^|\.)(\w*merger\w*|multi_modal_projector|connector|embed_vision)\.")


Part = Literal["llm", "vit", "aligner"]
"""Of a multimodal model, as `--freeze_llm` and its like name them: the language model, the tower that reads images, and
what joins the two."""


def part_of_model(name: str) -> Part:
    """Returns the part that a weight or module of this name (a weight's, or a module's with a dot behind it) is in."""
    if not _TOWER.search(name):
        return "llm"
    return "aligner" if _ALIGNER.search(name) else "vit"


def is_multimodal(config: Any) -> bool:
    """Says whether a transformers config is of more than a language model."""
    return config.get_text_config() is not config


def language_class(config: Any, towers: bool = False) -> Any:
    """Returns the class whose `from_pretrained` and `from_config` make the causal LM of this config, with `towers` as a
    whole where it has some."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    if not is_multimodal(config):
        return AutoModelForCausalLM
    whole = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    return AutoModelForCausalLM if whole is None else _never_placeholders(whole, towers)


@cache
def _never_placeholders(base: Any, towers: bool) -> Any:
    """Returns transformers' class `base`, which gives no placeholder a probability; without `towers` without what is
    not its language model."""

    class Language(base):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            if not towers:
                _prune(self, {decoder_of(self), self.get_output_embeddings()})
            self._keys_to_ignore_on_load_unexpected = {"."}  # what is lacking is told

        @classmethod
        def from_config(cls, config: Any, trust_remote_code: bool = False) -> Any:
            assert not trust_remote_code
            return cls._from_config(config)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            for token in placeholders(self.config):
                output.logits[..., token] = NEVER
            return output

    # A config and transformers' tables of names go by them.
    Language.__name__ = base.__name__
    Language.__qualname__ = base.__qualname__
    Language.__module__ = base.__module__
    return Language


def _prune(module: nn.Module, kept: set[nn.Module]) -> None:
    """Takes all out of a module but those that are kept, with what they are in."""
    for name, child in list(module.named_children()):
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            setattr(module, name, None)
        else:
            _prune(child, kept)


def decoder_of(model: Any) -> nn.Module:
    """Returns the model under the output head, which reads token ids and gives the last hidden states."""
    inner = model
    while inner.get_decoder() is not inner:
        inner = inner.get_decoder()
    # Llama 4's causal LM is its own decoder to transformers.
    return cast("nn.Module", inner.model if hasattr(inner, "lm_head") else inner)


def placeholders(config: Any) -> tuple[int, ...]:
    """Returns the tokens that stand for a part of an image, video or sound, which are never sampled; none of a text
    model."""
    if not is_multimodal(config):
        return ()
    found = {value for name, value in config.to_dict().items() if _PLACEHOLDER.fullmatch(name)}
    size = config.get_text_config().vocab_size
    return tuple(sorted(token for token in found if isinstance(token, int) and 0 <= token < size))


def probe_tokens(count: int, config: Any) -> list[int]:
    """Returns the fixed tokens that ways to compute a model are compared on.

    They are spread over the vocabulary by a prime, and do not repeat soon.
    """
    size = config.get_text_config().vocab_size
    never = placeholders(config)
    tokens = (number * 7919 % size for number in range(1, count + 1 + len(never) * count))
    return list(islice((token for token in tokens if token not in never), count))


def folder_of(model: str) -> Path:
    """Returns the folder of a model, that of the hub's cache for an id."""
    from huggingface_hub import snapshot_download

    folder = Path(model).expanduser()
    return folder if folder.is_dir() else Path(snapshot_download(model, local_files_only=True))


def copy_processor(model: str, folder: Path) -> None:
    """Copies to `folder` what a model folder (or id) has beside its tokenizer for images, videos and sound."""
    for name in _PROCESSOR:
        file = folder_of(model) / name
        if file.is_file():
            shutil.copy(file, folder)


def stored_tensors(model: str) -> dict[str, Path]:
    """Returns the file of each tensor of a model folder (or id), by the tensors' names there."""
    folder = folder_of(model)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in where.items()}
    with safe_open(folder / "model.safetensors", "pt") as file:
        return dict.fromkeys(file.keys(), folder / "model.safetensors")


def own_names(model: Any, conversions: Iterable[Any], stored: Iterable[str]) -> dict[str, str]:
    """Returns where tensors of a checkpoint are in `model` after these of transformers' conversions: by their names
    there, its own names."""
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    own = model.state_dict(keep_vars=True)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [
        conversion for conversion in conversions if not isinstance(conversion, WeightRenaming)
    ]
    own_name = {}
    for name in stored:
        here = rename_source_key(name, renamings, converters, model.base_model_prefix, own)[0]
        if here in own:
            own_name[name] = here

    return own_name


def kept_on_disk(model: Any, path: str) -> dict[str, Path]:
    """Returns the tensors in the files of `path` (a folder or id) that belong to the checkpoint and not to `model`, and
    the file of each: towers, MTP heads. A text model has none."""
    if not is_multimodal(model.config):
        return {}
    stored = stored_tensors(path)
    covered = own_names(model, model._weight_conversions, stored)
    return {name: file for name, file in stored.items() if name not in covered}
