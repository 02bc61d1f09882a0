"""Engines of the rollout server by name: each is a module with a function like `start_vllm`, and a line here."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

from swift_r1.flags.server import RolloutArguments
from swift_r1.serving.engines.base import InferenceEngine

_STARTERS = {
    "vllm": "swift_r1.serving.engines.vllm_start:start_vllm",
}


def start_engine(name: str, config: RolloutArguments, model_bytes: int) -> InferenceEngine:
    """Loads the model into a new engine, which takes seconds to minutes; raises whatever the engine raised, UsageError
    for arguments that it does not accept. `model_bytes`, an upper bound of the size of all weights, sets the
    deadlines."""
    starter: Callable[[RolloutArguments, int], InferenceEngine] = pkgutil.resolve_name(
        _STARTERS[name]
    )
    return starter(config, model_bytes)
