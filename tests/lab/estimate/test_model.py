"""Sizes from config.json: against counts by hand, and against transformers' own empty models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swift_r1.errors import UsageError
from swift_r1.lab.estimate.model import from_config, model_of
from tests.lab.estimate.conftest import EIGHT_B, SMALL, folder_of


def test_sizes_by_hand() -> None:
    model = from_config(SMALL)
    # A layer: queries 4 x 4, keys and values 2 x 4 each, output 4 x 4; three matrices 8 x 4; two norms of 4.
    layer = 16 + 8 + 8 + 16 + 3 * 32 + 8
    assert model.total == 10 * 4 + 2 * layer + 4 + 10 * 4 == 388
    assert model.dense_numbers == 388 - 40 - 40
    assert model.kv_numbers == 2 * (2 + 2)
    # 10 tokens: 2 x 308 each, and 4 x 2 layers x width 4 x context 5; the head, 2 x 40, for 3 of them.
    assert model.forward_flops(10, 3, 5) == 10 * (616 + 160) + 3 * 80


def test_a_published_size() -> None:
    assert from_config(EIGHT_B).total == 8_030_261_248  # what the model's own files hold


def test_experts_count_where_they_are_chosen() -> None:
    config = SMALL | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    model = from_config(config | {"moe_intermediate_size": 8})
    assert model.expert_numbers == 2 * 8 * 3 * 4 * 8  # layers, experts, matrices of 4 x 8
    assert model.active_numbers == model.dense_numbers + model.expert_numbers / 4
    assert model.read_numbers(1) == pytest.approx(
        model.dense_numbers + 40 + model.expert_numbers / 4
    )
    assert model.read_numbers(1000) == pytest.approx(
        model.dense_numbers + 40 + model.expert_numbers
    )


BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BASE |= {"intermediate_size": 96, "vocab_size": 128}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaConfig", {"tie_word_embeddings": True}),
    ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    ("MistralConfig", {}),
    ("Qwen2Config", {}),
    ("Qwen3Config", {"head_dim": 32}),
    ("Qwen3MoeConfig", {"head_dim": 32, "num_experts": 8, "mlp_only_layers": [1], **EXPERTS}),
    ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        }
        | {"n_group": 2, "topk_group": 1, **EXPERTS, **LATENT},
    ),
]


@pytest.mark.parametrize(("name", "more"), FAMILIES)
def test_the_same_as_transformers(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    from swift_r1.models.shape import shape_of

    getattr(transformers, name)(**BASE | more).save_pretrained(tmp_path)
    ours, theirs = model_of(str(tmp_path)).shape, shape_of(str(tmp_path))
    assert dict(ours.weights) == dict(theirs.weights)
    assert dict(ours.linear) == dict(theirs.linear)
    for field in ("head", "layers", "hidden", "feed_forward", "kv_width", "vocabulary", "dtype"):
        assert getattr(ours, field) == getattr(theirs, field), field


def test_other_families_by_transformers(tmp_path: Path) -> None:
    import transformers

    transformers.PhiConfig(**BASE).save_pretrained(tmp_path)
    model = model_of(str(tmp_path))
    assert model.total > 0 and model.heads_width == 64 and model.kv_numbers == 3 * 2 * 2 * 16


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama", "hidden_size": 4}'])
def test_no_config(content: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        model_of(str(tmp_path))
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError):
        model_of(str(tmp_path))


def test_a_model_in_a_larger_one(tmp_path: Path) -> None:
    folder_of({"model_type": "whole", "text_config": SMALL}, tmp_path)
    assert model_of(str(tmp_path)).total == 388
