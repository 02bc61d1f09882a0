"""What a model folder says beside its weights: the tokenizer, and the tokens that end a completion."""

from __future__ import annotations

from typing import Any

from torch import nn

from swift_r1.errors import UsageError


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load the tokenizer of --model {path}: {str(error).splitlines()[0]}") from error


def end_tokens(model: nn.Module, tokenizer: Any, turn_end: int | None = None) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's, those of the model's generation config, and the template's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, turn_end, *(configured if isinstance(configured, list) else [configured])} - {None}
    if not ends:
        raise UsageError("neither the tokenizer nor generation_config.json names an end token (eos_token_id)")
    return tuple(sorted(ends))
