"""Tiny reward models: one that scores, and language models that answer one word, whatever they are asked."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.conftest import save_tiny_model


def save_scorer(folder: Path, seed: int = 0) -> Path:
    """A random classifier of one label."""
    save_tiny_model(folder)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    torch.manual_seed(seed)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def save_speaker(folder: Path, says: str) -> Path:
    """A model whose next token depends on the last one alone, and whose answers are all `says`, which has no character
    twice."""
    save_tiny_model(folder, hidden_size=128, tied=False, max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chain = [
        tokenizer.convert_tokens_to_ids("\n"),
        *tokenizer(says)["input_ids"],
        tokenizer.eos_token_id,
    ]
    assert len(set(chain)) == len(chain), says
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(model.config.vocab_size, 128))
        model.lm_head.weight.zero_()
        for last, following in pairwise(chain):
            model.lm_head.weight[following, last] = 10.0
    model.save_pretrained(folder)
    return folder
