"""A tiny random model of each family: whatever sets it apart is set to something that matters, windows are short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WINDOW = 8
"""Tokens; the prompts and completions of the tests are longer."""

_MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LATENT = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,  # with the next but one, the size that vLLM has kernels for
    "q_lora_rank": 24,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    **_MOE,
}
_INDEXER = {"index_topk": WINDOW, "index_head_dim": 96, "index_n_heads": 16}
"""Of so many heads that no two keys have the same score: with few, those that all heads leave at 0 are equal."""
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
_MIXED = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _LLAMA3},
    "qwen2": {"rope_parameters": _YARN, "tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": False},
    "qwen3_moe": {"num_experts": 4, **_MOE},
    "qwen3_next": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        **_MOE,
    },
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"sliding_window": WINDOW},
    "starcoder2": {"sliding_window": WINDOW},
    "gemma2": {
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": _MIXED, "query_pre_attn_scalar": 24},
    "granite": {
        "logits_scaling": 3.0,
        "embedding_multiplier": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
    },
    "cohere": {"logit_scale": 0.4, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.4, "sliding_window": WINDOW, "layer_types": _MIXED},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        **_MOE,
    },
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    # a field of its checkpoints, read by vLLM alone
    "deepseek_v3": {**_LATENT, "topk_method": "noaux_tc"},
    "deepseek_v32": {**_LATENT, **_INDEXER},
    "deepseek_v4": {
        **_MOE,
        **_INDEXER,
        "n_routed_experts": 4,
        "head_dim": 64,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": WINDOW,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["hash_moe", "moe"],
    },
    "kimi_linear": {
        **{name: value for name, value in _LATENT.items() if name != "q_lora_rank"},
        "num_experts": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 32,
        "linear_num_heads": 2,
    },
    "minicpm3": {
        "num_key_value_heads": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "scale_emb": 4,
        "dim_model_base": 32,
    },
    "lfm2_moe": {
        "num_experts": 4,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
        **_MOE,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
    },
    "gpt2": {"n_positions": 1024, "n_embd": 64, "n_layer": 2, "n_head": 2},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
}

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_PIXELS = {**_TOWER, "image_size": 28, "patch_size": 14}
_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_DELTA = {
    name: value
    for name, value in FAMILIES["qwen3_next"].items()
    if name.startswith(("linear_", "layer_"))
}
_DELTA["rope_parameters"] = {**_SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
_GEMMA = FAMILIES["gemma3_text"]
_TOKENS = {"image_token_id": 104, "video_token_id": 105}

MULTIMODAL: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": _SECTIONS},
        "vision_config": {**_QWEN_TOWER, "fullatt_block_indexes": [0], "window_size": 16},
        **_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True}},
        "vision_config": {
            **_QWEN_TOWER,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        "tie_word_embeddings": True,
        **_TOKENS,
    },
    "qwen3_5": {
        "text_config": _DELTA,
        "vision_config": {**_QWEN_TOWER, "num_position_embeddings": 16},
        **_TOKENS,
    },
    "qwen3_5_moe": {
        "text_config": {**_DELTA, **_MOE, "num_experts": 4, "shared_expert_intermediate_size": 32},
        "vision_config": {**_QWEN_TOWER, "num_position_embeddings": 16},
        **_TOKENS,
    },
    "gemma3": {
        "text_config": _GEMMA,
        "vision_config": {"model_type": "siglip_vision_model", **_PIXELS},
        "mm_tokens_per_image": 4,
        "image_token_index": 104,
    },
    "gemma4": {
        "text_config": {
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 128,
            "final_logit_softcapping": 4.0,
        },
        "vision_config": {
            **_TOWER,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 64,
        },
        "image_token_id": 104,
        "video_token_id": 105,
        "audio_token_id": 106,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **_PIXELS, "head_dim": 16},
        "image_token_index": 104,
        "tie_word_embeddings": False,
    },
    "idefics3": {
        "text_config": {"model_type": "llama", "rope_parameters": _LLAMA3},
        "vision_config": _PIXELS,
        "image_token_id": 104,
        "pad_token_id": 0,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", "tie_word_embeddings": True},
        "vision_config": _PIXELS,
        "image_token_id": 104,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", "rope_parameters": _YARN},
        "vision_config": {**_PIXELS, "image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": 104,
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": {
            "intermediate_size_mlp": 96,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            # else the embedded engine refuses its chunks
            "layer_types": ["full_attention", "full_attention"],
        },
        "vision_config": {
            **_PIXELS,
            "intermediate_size": 128,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
        },
        "image_token_index": 104,
    },
    "glm4v": {
        "text_config": {
            "rope_parameters": {
                **_SECTIONS,
                "mrope_section": [2, 3, 3],
                "partial_rotary_factor": 0.5,
            },
            "attention_bias": True,  # of its checkpoints, read by vLLM alone
        },
        "vision_config": {**_QWEN_TOWER, "image_size": 16},
        **_TOKENS,
    },
}
"""Language models with towers beside them, which a run over texts leaves as they are."""


def family_config(family: str, vocab_size: int, **changes: Any) -> Any:
    """The config of its tiny model: two layers, two heads of 32."""
    from transformers import AutoConfig

    fields = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family in ("gpt2", "opt"):
        fields = {
            name: value
            for name, value in fields.items()
            if name not in ("num_key_value_heads", "head_dim")
        }
    if family.startswith("deepseek"):
        del fields["head_dim"]
    if family in MULTIMODAL:
        own = MULTIMODAL[family]
        fields["vocab_size"] += 8  # placeholders are no part of any text
        return AutoConfig.for_model(
            family, **own | {"text_config": fields | own["text_config"] | changes}
        )
    return AutoConfig.for_model(family, **fields | FAMILIES[family] | changes)


def family_class(family: str) -> Any:
    """transformers' class for whole models of it."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    return AutoModelForMultimodalLM if family in MULTIMODAL else AutoModelForCausalLM


def tower_names(model: Any) -> set[str]:
    """Of a whole model, the names of what is no language model."""
    if model.config.get_text_config() is model.config:
        return set()
    text = ("language_model.", "text_model.", "lm_head.")
    return {name for name in model.state_dict() if not name.removeprefix("model.").startswith(text)}


def family_model(family: str, vocab_size: int, seed: int = 0, **changes: Any) -> Any:
    """Random weights and persistent buffers, spread enough that the next token is far from uniform."""
    import torch

    torch.manual_seed(seed)
    model = family_class(family).from_config(
        family_config(family, vocab_size, **changes), dtype=torch.float32
    )
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent and buffer.is_floating_point():
            buffer.uniform_(-0.5, 0.5)
    with torch.no_grad():
        for weight in model.parameters():
            # biases, norms and sinks begin as constants, Gemma 3's projection as zeros
            if weight.dim() == 1 or not weight.any():
                weight.add_(torch.empty_like(weight).uniform_(-0.2, 0.2))
    return model


def save_family(folder: Path, family: str, **changes: Any) -> Path:
    """A model folder, with the tiny tokenizer."""
    from tests.conftest import save_tiny_tokenizer

    family_model(family, save_tiny_tokenizer(folder), **changes).save_pretrained(folder)
    return folder
