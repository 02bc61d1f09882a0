"""Tiny models that read images, complete: weights, tokenizer with placeholders, processor, chat template; and images."""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_r1.data.images import ImageFile
from tests.families import family_model

TEXTS = 103
"""Tokens of the tiny tokenizer; those of images come behind it, so that `image_token_id` is 104 as in `MULTIMODAL`."""

_TURN = "<|im_start|>{{ message['role'] }}\n"
_PARTS = (
    "{% for message in messages %}HEAD"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _template(image: str) -> str:
    return _PARTS.replace("HEAD", _TURN).replace("IMAGE", image)


@dataclass(frozen=True, slots=True)
class Sight:
    """What the processor of a family is made of.

    Attributes:
        tokens: those of images, from id 103 on.
        named: attributes of the tokenizer by which its processor finds some of them.
        config: what the model's config says about them.
        images: transformers' image processor, and its sizes.
        processor: transformers' processor, and its sizes.
    """

    tokens: tuple[str, ...]
    template: str
    images: tuple[str, dict[str, Any]]
    processor: tuple[str, dict[str, Any]]
    named: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


_QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
_QWEN_TEMPLATE = _template("<|vision_start|><|image_pad|><|vision_end|>")
_QWEN_CONFIG = {"vision_start_token_id": TEXTS, "vision_end_token_id": TEXTS + 3}
_QWEN_IMAGES = (
    "Qwen2VLImageProcessorPil",
    {"patch_size": 4, "size": {"shortest_edge": 8 * 8, "longest_edge": 48 * 48}},
)

SIGHTS: dict[str, Sight] = {
    "qwen2_5_vl": Sight(
        _QWEN_TOKENS,
        _QWEN_TEMPLATE,
        _QWEN_IMAGES,
        ("Qwen2_5_VLProcessor", {}),
        config=_QWEN_CONFIG,
    ),
    "qwen3_vl": Sight(
        _QWEN_TOKENS,
        _QWEN_TEMPLATE,
        _QWEN_IMAGES,
        ("Qwen3VLProcessor", {}),
        config=_QWEN_CONFIG,
    ),
    "qwen3_5": Sight(
        _QWEN_TOKENS,
        _QWEN_TEMPLATE,
        _QWEN_IMAGES,
        ("Qwen3VLProcessor", {}),
        config=_QWEN_CONFIG,
    ),
    "gemma3": Sight(
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        _template("<start_of_image>"),
        ("Gemma3ImageProcessorPil", {"size": {"height": 28, "width": 28}}),
        ("Gemma3Processor", {"image_seq_length": 4}),
        named={
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
        config={"boi_token_index": TEXTS, "eoi_token_index": TEXTS + 2},
    ),
    "idefics3": Sight(
        (
            "<fake_token_around_image>",
            "<image>",
            "<end_of_utterance>",
            "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
        ),
        _template("<image>"),
        (
            "Idefics3ImageProcessorPil",
            {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        ),
        ("Idefics3Processor", {"image_seq_len": 1}),
    ),
    "internvl": Sight(
        ("<img>", "<IMG_CONTEXT>", "</img>", "<video>"),
        _template("<IMG_CONTEXT>\n"),
        (
            "GotOcr2ImageProcessorPil",
            {"size": {"height": 28, "width": 28}, "min_patches": 1, "max_patches": 4},
        ),
        ("InternVLProcessor", {"image_seq_length": 1}),
        named={
            "start_image_token": "<img>",
            "context_image_token": "<IMG_CONTEXT>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        config={"image_seq_length": 1},
    ),
}
"""Of six families; an image of 28 x 28 pixels becomes 4 to 9 tokens, or one per tile."""


def write_processor(folder: Path, family: str) -> None:
    """Writes the tokenizer and the processor of a tiny model into its folder."""
    import transformers
    from transformers import AddedToken, PreTrainedTokenizerFast

    from tests.conftest import save_tiny_tokenizer

    sight = SIGHTS[family]
    assert save_tiny_tokenizer(folder) == TEXTS
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(one, special=True, normalized=False) for one in sight.tokens])
    tokenizer.chat_template = sight.template
    tokenizer.save_pretrained(folder)
    name, sizes = sight.images
    getattr(transformers, name)(**sizes).save_pretrained(folder)
    about = folder / "tokenizer_config.json"
    content = json.loads(about.read_text())
    content |= {"extra_special_tokens": sight.named or list(sight.tokens)}
    about.write_text(json.dumps(content))
    name, sizes = sight.processor
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **sizes}))


def write_tiny(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes a whole tiny model of a family of `SIGHTS` that reads images, and returns its folder; `changes` are of its
    text model's config."""
    model = family_model(family, TEXTS, seed, **changes)
    for name, value in SIGHTS[family].config.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    write_processor(folder, family)
    return folder


def picture(width: int = 28, height: int = 28, seed: int = 0) -> bytes:
    """A PNG of random colours."""
    import numpy as np
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).save(file, "PNG")
    return file.getvalue()


def image_file(folder: Path, data: bytes, size: tuple[int, int]) -> ImageFile:
    """Writes an image into a folder, and returns what names it."""
    name = hashlib.sha256(data).hexdigest()
    part = folder / f"{name}.{os.getpid()}"  # several ranks write the same one
    part.write_bytes(data)
    part.rename(folder / name)
    return ImageFile(str(folder / name), name, *size)
