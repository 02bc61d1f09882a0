"""What transformers 4 reads in a model's folder, and transformers 5 no longer writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"  # where layers differ
_THETA, _SHARE = "rope_theta", "partial_rotary_factor"
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_WORDS = {_THETA: (_FULL, _THETA), _SHARE: (_FULL, _SHARE)}
_OWN_WORDS = {
    "gemma3": {_THETA: (_FULL, _THETA), "rope_local_base_freq": (_SLIDING, _THETA)},
    "gpt_neox": {"rotary_emb_base": (_FULL, _THETA), "rotary_pct": (_FULL, _SHARE)},
    "modernbert": {"global_rope_theta": (_FULL, _THETA), "local_rope_theta": (_SLIDING, _THETA)},
    "olmo3": {_THETA: (_FULL, _THETA)},
}
"""Which layers' field a word stands for; in families, by the beginning of their names, that have words of their own."""


def write_older_rope(folder: Path) -> None:
    """Adds the rotary embedding to a folder's config.json as transformers 4 reads it, which without `rope_theta` and
    `rope_scaling` computes another model."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    _add_older_rope(config)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _add_older_rope(config: dict[str, Any]) -> None:
    for part in list(config.values()):
        if isinstance(part, dict):
            _add_older_rope(part)
    rope = config.get("rope_parameters") or {}
    whole = rope.get(_FULL) or rope
    family = str(config.get("model_type"))
    own = [words for name, words in _OWN_WORDS.items() if family.startswith(name)]
    if _THETA not in whole or (whole is not rope and not own):
        return  # layers differ in no other family that transformers 4 has
    for word, (layers, name) in (own[0] if own else _WORDS).items():
        value = (rope.get(layers) or whole).get(name)
        if value is not None:
            config[word] = value
    config["rope_scaling"] = _scaling(whole, config)


def _scaling(rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns transformers 4's `rope_scaling`, without what transformers 5 has put there."""
    scaling = {name: value for name, value in rope.items() if name not in (_THETA, _SHARE)}
    if "type" in scaling:  # the older word: some configs are refused where it is not alone
        scaling.pop("rope_type", None)
    kind = scaling.get("type", scaling.get("rope_type"))
    # With it transformers 4 takes the ratio of the two lengths in place of the factor.
    length = config.get(_ORIGINAL_LENGTH, config.get("max_position_embeddings"))
    if kind in ("yarn", "longrope") and scaling.get(_ORIGINAL_LENGTH) == length:
        del scaling[_ORIGINAL_LENGTH]
    return None if kind == "default" and len(scaling) == 1 else scaling
