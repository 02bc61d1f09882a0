"""A model folder that generates through transformers in this process, for evaluations and for questions on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_r1.serving.engines.transformers import TransformersEngine


def load_folder_engine(
    folder: str,
    tokenizer: Any,
    dtype: str | None,
    device: str,
) -> TransformersEngine:
    """Loads a model folder as the engine of training without a server; its `eos` are the tokens that end an answer."""
    import torch

    from swift_r1.models.loading import end_tokens, load_model
    from swift_r1.serving.engines.transformers import TransformersEngine

    model = load_model(folder, dtype, gradient_checkpointing=False)
    torch.nn.Module.to(model, device).requires_grad_(False)
    ends = end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    return TransformersEngine(model, tokenizer, ends, pad)
