"""The sizes of a model from its config alone: the model is built without a single number in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from swift_r1.errors import UsageError, one_line
from swift_r1.models.tied_head import second_head

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from swift_r1.flags import RunFlags
    from swift_r1.flags.adapters import AdapterArguments


LOGITS_BYTES = 128 * 2**20
"""Float32 logits that one chunk of the output head may occupy on a CPU (models/logprobs.py)."""
_GPU_LOGITS_BYTES = 2 * 2**30
KEPT_CHUNKS = 2
"""Chunks whose exponentials are kept for the backward pass; those of the rest are computed again."""


def gpu_logits_bytes(memory: float) -> int:
    """`LOGITS_BYTES` on a GPU of `memory` bytes: its products need more rows, and every chunk reads and writes the
    whole gradient of the head."""
    return min(_GPU_LOGITS_BYTES, int(0.03 * memory))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes count numbers, not bytes."""

    weights: tuple[tuple[str, int], ...]  # name and size of each, tied ones once
    # name and shape (out, in) of each linear layer except the output head
    linear: tuple[tuple[str, tuple[int, int]], ...]
    head: int  # of the output head, also where it is the embedding
    layers: int
    hidden: int
    feed_forward: int
    kv_width: int  # of one layer's keys (or values)
    vocabulary: int
    dtype: str
    tower: int = 0  # numbers among the weights of what reads images, where that is loaded

    @property
    def total(self) -> int:
        return sum(size for _, size in self.weights)

    @property
    def without_head(self) -> int:
        """Numbers of the model without an output head of its own; one that is the embedding counts."""
        return sum(size for name, size in self.weights if not name.endswith("lm_head.weight"))

    @property
    def quantized(self) -> int:
        """Numbers that are stored in 4 bits where weights are."""
        return sum(rows * columns for _, (rows, columns) in self.linear)

    def adapters(self, lora: AdapterArguments) -> int:
        """Numbers in these adapters, and in the modules that are trained whole beside them."""
        chosen = (shape for name, shape in self.linear if lora.adapts(name))
        low_rank = sum(
            lora.lora_rank * (rows + columns) + lora.use_dora * rows for rows, columns in chosen
        )
        words = tuple(word.removeprefix("all-") for word in lora.modules_to_save)
        whole = (size for name, size in self.weights if any(word in name for word in words))
        return low_rank + sum(whole)


@cache
def transformers_config(model: str, what: str = "the config of") -> Any:
    """Returns transformers' config of a model folder (or id).

    Code in that folder is never run, nor asked about at a terminal. Raises UsageError, which names `what` cannot be
    loaded: transformers cannot read it or does not know the architecture, or the files have another output head.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        if getattr(config.get_text_config(), "num_attention_heads", 1) == 0:
            raise ZeroDivisionError
    except ZeroDivisionError as error:  # transformers' own for some families
        raise UsageError(
            f"cannot load {what} {model}: num_attention_heads, or another size, is 0"
        ) from error
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UsageError(f"cannot load {what} {model}: {one_line(error)}") from error
    if getattr(config, "tie_word_embeddings", False) and (why := second_head(model)):
        raise UsageError(f"cannot load {what} {model}: {why}")
    return config


def context_length(model: str) -> int | None:
    """Returns the tokens that a model folder (or id) takes by its config; None where that does not say. Raises
    UsageError: the config cannot be read."""
    length: int | None = getattr(
        transformers_config(model).get_text_config(), "max_position_embeddings", None
    )
    return length


def longest_prompt(args: RunFlags) -> int | None:
    """Returns how many tokens a prompt of a run may have: `--max_length`, or what the model's context leaves beside a
    completion; None where several turns are cut to it as they go. Raises UsageError where no prompt would fit."""
    if args.max_length is not None or args.scheduler_name is not None or args.plays_agent:
        return args.max_length
    context = args.vllm_max_model_len or context_length(args.model)
    if context is None:
        return None
    if context <= args.max_completion_length:
        raise UsageError(
            f"--max_completion_length {args.max_completion_length} leaves no room for a prompt: the model takes "
            f"{context} tokens"
        )
    return context - args.max_completion_length


def skeleton(model: str, towers: bool = False) -> nn.Module:
    """Returns the causal LM `model` (a folder or id) on the meta device, without numbers."""
    import torch

    from swift_r1.models.multimodal import language_class

    config = transformers_config(model)
    kind = language_class(config, towers)
    with torch.device("meta"):
        empty: nn.Module = kind.from_config(config, trust_remote_code=False)
    return empty


def tied_names(model: nn.Module) -> set[str]:
    """Returns the names of the weights that are the same as others."""
    return set(cast("PreTrainedModel", model).all_tied_weights_keys)


@cache
def shape_of(model: str, towers: bool = False) -> ModelShape:
    """Returns the shape of the model folder (or id) `model`, with `towers` as it is loaded for rows with images; it takes
    seconds, and no weights. Raises UsageError: transformers does not know the architecture."""
    from torch import float32
    from torch.nn import Linear

    from swift_r1.models.multimodal import part_of_model

    try:
        empty: Any = skeleton(model, towers)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"cannot read the config of --model {model}: {one_line(error)}") from error

    text = empty.config.get_text_config()
    head = empty.get_output_embeddings()
    linear = [
        (name, module) for name, module in empty.named_modules() if isinstance(module, Linear)
    ]
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    sizes = {name: parameter.numel() for name, parameter in empty.named_parameters()}
    for name in tied_names(empty):
        sizes.pop(name, None)
    return ModelShape(
        weights=tuple(sizes.items()),
        linear=tuple(
            (name, (m.out_features, m.in_features)) for name, m in linear if m is not head
        ),
        head=head.weight.numel(),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        feed_forward=getattr(text, "intermediate_size", 4 * text.hidden_size),
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_width,
        vocabulary=text.vocab_size,
        dtype=str(empty.config.dtype or float32).removeprefix("torch."),
        tower=sum(size for name, size in sizes.items() if part_of_model(name) != "llm"),
    )
