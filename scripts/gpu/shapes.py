"""Models of real shapes with random weights: Qwen2.5's published sizes in Llama's classes, since transformers reads a
Qwen2 folder with Qwen's own tokenizer; and a tokenizer that has a word for each id."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

REHEARSES = "GPU_REHEARSAL" in os.environ
DTYPE = "float32" if REHEARSES else "bfloat16"
# width, feed-forward, layers, heads, key-value heads, vocabulary, tied
SHAPES = {
    "tiny": (64, 128, 2, 2, 1, 512, True),
    "0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151_936, True),
    "7b": (3584, 18_944, 28, 28, 4, 152_064, False),
}


def model_folder(name: str) -> Path:
    """A Hugging Face folder of that shape (`tiny` in a rehearsal), made at the first call and gone with the kit."""
    if (given := os.environ.get("GPU_MODEL")) and name == "0.5b":
        return Path(given)
    name = "tiny" if REHEARSES else name
    folder = Path(os.environ["GPU_WORK"]) / f"qwen2.5-{name}"
    if not (folder / "made").exists():
        make(name, folder)
        (folder / "made").touch()
    return folder


def make(name: str, folder: Path) -> None:
    """Weights are drawn on the GPU where there is one; spread so that next tokens differ in likelihood."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    width, inner, layers, heads, shared, vocabulary, tied = SHAPES[name]
    config: Any = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=4096,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        initializer_range=0.05,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer(vocabulary).save_pretrained(folder)


def tokenizer(vocabulary: int) -> Any:
    """The demo's characters, and `<number>` for each id beyond them."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "countdown_demo"))
    import tiny_model

    known = len(tiny_model.make_tokenizer())
    spare = [f"<{number}>" for number in range(vocabulary - known)]
    # As characters: words would make a pattern of all of them.
    return tiny_model.make_tokenizer(characters=[*tiny_model.CHARACTERS, *spare])
