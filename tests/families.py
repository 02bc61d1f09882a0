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
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
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
    "deepseek_v3": {**_LATENT, "topk_method": "noaux_tc"},  # a field of its checkpoints, read by vLLM alone
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": _MIXED},
    "gpt2": {"n_positions": 1024, "n_embd": 64, "n_layer": 2, "n_head": 2},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
}


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
        fields = {name: value for name, value in fields.items() if name not in ("num_key_value_heads", "head_dim")}
    if family.startswith("deepseek"):
        del fields["head_dim"]
    return AutoConfig.for_model(family, **fields | FAMILIES[family] | changes)


def family_model(family: str, vocab_size: int, seed: int = 0, **changes: Any) -> Any:
    """Random weights and persistent buffers, spread enough that the next token is far from uniform."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family_config(family, vocab_size, **changes), dtype=torch.float32)
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent and buffer.is_floating_point():
            buffer.uniform_(-0.5, 0.5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # biases, norms and sinks begin as constants
                weight.add_(torch.empty_like(weight).uniform_(-0.2, 0.2))
    return model


def save_family(folder: Path, family: str, **changes: Any) -> Path:
    """A model folder, with the tiny tokenizer."""
    from tests.conftest import save_tiny_tokenizer

    family_model(family, save_tiny_tokenizer(folder), **changes).save_pretrained(folder)
    return folder
