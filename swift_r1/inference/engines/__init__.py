"""Engines of the rollout server by name. Another one is a module with a function like `start_vllm`, and a line here."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

from swift_r1.arguments.server import RolloutArguments
from swift_r1.inference.engines.base import InferenceEngine

_STARTERS = {
    "vllm": "swift_r1.inference.engines.vllm_start:start_vllm",
}


def start_engine(name: str, config: RolloutArguments, model_bytes: int) -> InferenceEngine:
    """Loads the model into a new engine, which takes seconds to minutes: call it off the event loop.

    Args:
        model_bytes: upper bound of the size of all weights, from which calls that move them get their deadline.

    Raises:
        UsageError: for arguments that the engine does not accept.
        Exception: whatever the engine raised (no memory, broken model folder, ...).
    """
    starter: Callable[[RolloutArguments, int], InferenceEngine] = pkgutil.resolve_name(_STARTERS[name])
    return starter(config, model_bytes)
