"""The costs of a model, from its config.json alone: without torch, in milliseconds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from swift_r1.data.hubs import is_hub_id
from swift_r1.errors import UsageError
from swift_r1.models.shape import ModelShape, shape_of
from swift_r1.runtime.files import read_text

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
"""The `model_type`s whose weights are known here; of others transformers builds the empty model, in seconds."""

Matrices = list[tuple[str, tuple[int, int]]]


@dataclass(frozen=True)
class Model:
    """A decoder, in numbers (not bytes).

    Attributes:
        shape: its weights, for the memory of training.
        heads_width: of all queries of a layer together.
        kv_numbers: kept per token in the cache, over all layers.
        experts, experts_per_token: of a layer with experts; 1 and 1 without.
        expert_numbers: weights of all routed experts of all layers.
    """

    shape: ModelShape
    heads_width: int
    kv_numbers: int
    experts: int = 1
    experts_per_token: int = 1
    expert_numbers: int = 0

    @cached_property
    def total(self) -> int:
        return self.shape.total

    @cached_property
    def dense_numbers(self) -> int:
        """Weights that every token is multiplied with, routed experts, output head and towers left out."""
        embeddings = sum(size for name, size in self.shape.weights if "embed_tokens" in name)
        own_head = sum(size for name, size in self.shape.weights if name.startswith("lm_head."))
        return self.total - embeddings - own_head - self.expert_numbers - self.shape.tower

    @property
    def is_sparse(self) -> bool:
        return self.experts > 1

    @cached_property
    def active_numbers(self) -> float:
        """Weights that one token is multiplied with, without the output head."""
        return self.dense_numbers + self.expert_numbers * self.experts_per_token / self.experts

    def forward_flops(self, tokens: float, predicted: float, context: float) -> float:
        """2 FLOP per weight and token; 4 per position attended to and unit of width (scores, and their sum of values);
        the head only where something is predicted.

        Args:
            tokens: computed.
            predicted: of those, the ones that get a distribution.
            context: positions that a token attends to, on average.
        """
        attention = 4.0 * self.shape.layers * self.heads_width * context
        return tokens * (2.0 * self.active_numbers + attention) + predicted * 2.0 * self.shape.head

    def read_numbers(self, tokens: float) -> float:
        """Weights that a step over so many tokens reads: of the experts, those that at least one token chose."""
        share = self.experts_per_token / self.experts
        chosen = 1.0 - math.pow(1.0 - share, max(tokens, 1.0))
        return self.dense_numbers + self.shape.head + self.expert_numbers * chosen


def model_of(path: str) -> Model:
    """Reads a model folder with a config.json (weights are not needed), such a file, or a hub id whose config was
    downloaded before. Raises UsageError: there is none, or it is of no model."""
    folder = Path(path).expanduser()
    file = folder if folder.is_file() else folder / "config.json"
    if not folder.exists() and is_hub_id(path):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json")
        file = Path(cached) if isinstance(cached, str) else file
    try:
        config: Any = json.loads(read_text(file))
    except OSError as error:
        raise UsageError(
            f"--model {path}: {file}: {error.strerror or error}; an estimate needs the model's config.json, no more"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--model {path}: {file} is not valid JSON ({error})") from error
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    sizes = ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size")
    for name in sizes:
        if not isinstance(config.get(name, 1), int) or config.get(name, 1) < 1:
            raise UsageError(f"--model {path}: {file}: {name} is {config[name]!r}")
    if config.get("model_type") in FAMILIES:
        try:
            return from_config(config)
        except KeyError as error:
            raise UsageError(f"--model {path}: {file} has no {error.args[0]}") from error
    shape = shape_of(str(file.parent))
    heads = int(config.get("num_attention_heads", 1)) * _head_width(config)
    return Model(shape, heads, 2 * shape.layers * shape.kv_width)


def with_tower(model: Model, path: str) -> Model:
    """Returns the model with what reads images, which transformers builds empty. Raises UsageError: it has none."""
    folder = Path(path).expanduser()
    whole = shape_of(str(folder.parent if folder.is_file() else folder), towers=True)
    if not whole.tower or not whole.patch:
        raise UsageError(f"--mean_image_pixels: --model {path} reads texts alone")
    return replace(model, shape=whole)


def from_config(config: Mapping[str, Any]) -> Model:
    """Returns the model of a config of one of the `FAMILIES`. Raises KeyError: a size is missing."""
    layers = config["num_hidden_layers"]
    hidden = config["hidden_size"]
    vocabulary = config["vocab_size"]
    heads = config["num_attention_heads"]
    weights: list[tuple[str, int]] = [("model.embed_tokens.weight", vocabulary * hidden)]
    linear: Matrices = []
    for index in range(layers):
        prefix = f"model.layers.{index}"
        matrices = [*_attention(config, prefix), *_feed_forward(config, prefix, index)]
        for name, (rows, columns) in matrices:
            weights.append((_weight_name(name), rows * columns))
            if ".mlp.experts." not in name and not name.endswith(".gate"):
                linear.append((name, (rows, columns)))
        weights += _vectors(config, prefix, index, matrices)
    weights.append(("model.norm.weight", hidden))
    if not config.get("tie_word_embeddings", False):
        weights.append(("lm_head.weight", vocabulary * hidden))
    kv_width = config.get("num_key_value_heads", heads) * _head_width(config)
    heads_width = heads * _head_width(config)
    cached = 2 * kv_width
    if config["model_type"] == "deepseek_v3":
        widths = config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]
        heads_width = round(heads * widths / 2)
        cached = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    shape = ModelShape(
        weights=tuple(weights),
        linear=tuple(linear),
        head=vocabulary * hidden,
        layers=layers,
        hidden=hidden,
        feed_forward=config["intermediate_size"],
        kv_width=kv_width,
        vocabulary=vocabulary,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )
    dense = Model(shape, heads_width, kv_numbers=layers * cached)
    experts = _experts(config)
    if not experts:
        return dense
    sparse = sum(_is_sparse(config, index) for index in range(layers))
    return replace(
        dense,
        experts=experts,
        experts_per_token=config["num_experts_per_tok"],
        expert_numbers=sparse * experts * 3 * hidden * _expert_width(config),
    )


def _head_width(config: Mapping[str, Any]) -> int:
    if "hidden_size" not in config or "num_attention_heads" not in config:
        return 1
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _attention(config: Mapping[str, Any], prefix: str) -> Matrices:
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    width = _head_width(config)
    at = f"{prefix}.self_attn"
    if config["model_type"] == "deepseek_v3":
        rope = config["qk_rope_head_dim"]
        nope = config["qk_nope_head_dim"]
        value = config["v_head_dim"]
        query = config["q_lora_rank"]
        latent = config["kv_lora_rank"]
        return [
            (f"{at}.q_a_proj", (query, hidden)),
            (f"{at}.q_b_proj", (heads * (nope + rope), query)),
            (f"{at}.kv_a_proj_with_mqa", (latent + rope, hidden)),
            (f"{at}.kv_b_proj", (heads * (nope + value), latent)),
            (f"{at}.o_proj", (hidden, heads * value)),
        ]
    kv = config.get("num_key_value_heads", heads) * width
    return [
        (f"{at}.q_proj", (heads * width, hidden)),
        (f"{at}.k_proj", (kv, hidden)),
        (f"{at}.v_proj", (kv, hidden)),
        (f"{at}.o_proj", (hidden, heads * width)),
    ]


def _feed_forward(config: Mapping[str, Any], prefix: str, index: int) -> Matrices:
    hidden = config["hidden_size"]
    experts = _experts(config)
    if not _is_sparse(config, index):
        return _gated(f"{prefix}.mlp", hidden, config["intermediate_size"])
    wide = _expert_width(config)
    found: Matrices = [
        (f"{prefix}.mlp.experts.gate_up_proj", (experts * 2 * wide, hidden)),
        (f"{prefix}.mlp.experts.down_proj", (experts * hidden, wide)),
        (f"{prefix}.mlp.gate", (experts, hidden)),
    ]
    shared = config.get("n_shared_experts") or 0
    if shared:
        found += _gated(f"{prefix}.mlp.shared_experts", hidden, shared * wide)
    return found


def _gated(at: str, hidden: int, wide: int) -> Matrices:
    return [
        (f"{at}.gate_proj", (wide, hidden)),
        (f"{at}.up_proj", (wide, hidden)),
        (f"{at}.down_proj", (hidden, wide)),
    ]


def _vectors(
    config: Mapping[str, Any],
    prefix: str,
    index: int,
    matrices: Matrices,
) -> Iterator[tuple[str, int]]:
    """Norms and biases of a layer."""
    hidden = config["hidden_size"]
    kind = config["model_type"]
    at = f"{prefix}.self_attn"
    biased: tuple[str, ...] = ("q_proj", "k_proj", "v_proj") if kind == "qwen2" else ()
    if kind != "qwen2" and config.get("attention_bias"):
        biased = ("q_proj", "k_proj", "v_proj", "o_proj")
    if config.get("mlp_bias"):
        biased = (*biased, "gate_proj", "up_proj", "down_proj")
    for name, (rows, _) in matrices:
        if name.rpartition(".")[2] in biased:
            yield f"{name}.bias", rows
    if kind in ("qwen3", "qwen3_moe"):
        yield f"{at}.q_norm.weight", _head_width(config)
        yield f"{at}.k_norm.weight", _head_width(config)
    if kind == "deepseek_v3":
        yield f"{at}.q_a_layernorm.weight", config["q_lora_rank"]
        yield f"{at}.kv_a_layernorm.weight", config["kv_lora_rank"]
    yield f"{prefix}.input_layernorm.weight", hidden
    yield f"{prefix}.post_attention_layernorm.weight", hidden


def _weight_name(name: str) -> str:
    """transformers keeps a layer's experts in one parameter, which is no module."""
    return name if ".mlp.experts." in name else f"{name}.weight"


def _experts(config: Mapping[str, Any]) -> int:
    return int(
        config.get("num_experts")
        or config.get("n_routed_experts")
        or config.get("num_local_experts")
        or 0
    )


def _expert_width(config: Mapping[str, Any]) -> int:
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def _is_sparse(config: Mapping[str, Any], index: int) -> bool:
    if not _experts(config):
        return False
    if index in (config.get("mlp_only_layers") or ()) or index < config.get(
        "first_k_dense_replace", 0
    ):
        return False
    return bool((index + 1) % config.get("decoder_sparse_step", 1) == 0)
