"""Evaluation: benchmarks, their statistics, and `swift eval`. Importing it loads neither torch nor an engine."""

from __future__ import annotations

import json
from pathlib import Path

ADDED_VARIABLE = "SWIFT_R1_EVAL_ADDED"
"""Names the variables that `swift eval` added to its process's environment: a server that it starts adds its own."""


def adapters_base(model: str) -> str | None:
    """The base model of a folder of adapters (a checkpoint of `--train_type lora`); None for a whole model."""
    path = Path(model).expanduser() / "adapter_config.json"
    return str(json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]) if path.is_file() else None
