"""What transformers 4 reads of a config that transformers 5 has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from swift_r1.models.older_readers import write_older_rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LINEAR = {"rope_type": "linear", "factor": 8.0}
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
OLDER: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_theta": 1e6, "rope_scaling": None},
    "qwen3_moe": {"rope_theta": 1e7, "rope_scaling": YARN},
    "mistral": {
        "rope_theta": 1e6,
        "rope_scaling": YARN | {"original_max_position_embeddings": 64},
    },
    "llama": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "deepseek_v3": {"rope_theta": 2e4, "rope_scaling": {"type": "yarn", "factor": 40.0}},
    "phi3": {
        "rope_theta": 3e4,
        "rope_scaling": LONG,
        "original_max_position_embeddings": 64,
        "pad_token_id": 0,
    },
    "glm4": {"rope_theta": 3e4, "rope_scaling": None, "partial_rotary_factor": 0.25},
    "gpt_neox": {"rotary_emb_base": 3e4, "rotary_pct": 0.5, "rope_scaling": None},
    "gemma3_text": {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
    "gemma3": {
        "text_config": {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}
    },
    "qwen2_5_vl": {
        "text_config": {
            "rope_theta": 2e6,
            "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]},
        }
    },
    "olmo3": {"rope_theta": 6e5, "rope_scaling": YARN},
}
"""Configs as transformers 4 writes them, whose models compute otherwise without these fields."""


@pytest.mark.parametrize("family", OLDER)
def test_the_fields_of_transformers_4_come_back_as_they_were(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family} | SIZES | OLDER[family]))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    known = AutoConfig.from_pretrained(tmp_path).to_dict()
    caplog.clear()

    write_older_rope(tmp_path)
    written, wanted = json.loads(path.read_text()), OLDER[family]
    written, wanted = written.get("text_config", written), wanted.get("text_config", wanted)
    assert {name: written[name] for name in wanted} == wanted
    assert written["rope_parameters"]
    again = AutoConfig.from_pretrained(tmp_path).to_dict()
    extra = {"partial_rotary_factor"}  # of Phi-3, which has a field of this name from then on
    assert {name: again[name] for name in known} == known and again.keys() - known.keys() <= extra
    assert not caplog.records


def test_what_transformers_4_does_not_know_stays_as_it_is(tmp_path: Path) -> None:
    for family in ("gemma4_text", "gpt2", "laguna"):
        AutoConfig.for_model(family).save_pretrained(tmp_path)
        before = (tmp_path / "config.json").read_text()
        write_older_rope(tmp_path)
        assert (tmp_path / "config.json").read_text() == before
