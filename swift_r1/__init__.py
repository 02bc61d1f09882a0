"""R1-Zero style reinforcement learning for language models, driven by plugins.

The names below are a plugin author's whole world; each is loaded when it is first asked for, so that
importing this package costs nothing and loads neither torch nor vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "swift_r1.rewards": ("ORM", "AsyncORM", "orms"),
    "swift_r1.plugins.agents": ("Agent", "agents"),
    "swift_r1.data.tool_registry": ("tools",),
    "swift_r1.data.sampler": ("Outcome", "Sampler", "samplers"),
    "swift_r1.record.reporters": ("Reporter", "trackers"),
    "swift_r1.data": (
        "AlpacaPreprocessor",
        "AutoPreprocessor",
        "DatasetMeta",
        "MessagesPreprocessor",
        "ResponsePreprocessor",
        "RowPreprocessor",
        "SubsetDataset",
        "register_dataset",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ORM",
    "Agent",
    "AlpacaPreprocessor",
    "AsyncORM",
    "AutoPreprocessor",
    "DatasetMeta",
    "MessagesPreprocessor",
    "Outcome",
    "Reporter",
    "ResponsePreprocessor",
    "RowPreprocessor",
    "Sampler",
    "SubsetDataset",
    "__version__",
    "agents",
    "orms",
    "register_dataset",
    "samplers",
    "tools",
    "trackers",
]

if TYPE_CHECKING:
    __version__: str
    from swift_r1.data import (
        AlpacaPreprocessor,
        AutoPreprocessor,
        DatasetMeta,
        MessagesPreprocessor,
        ResponsePreprocessor,
        RowPreprocessor,
        SubsetDataset,
        register_dataset,
    )
    from swift_r1.data.sampler import Outcome, Sampler, samplers
    from swift_r1.data.tool_registry import tools
    from swift_r1.plugins.agents import Agent, agents
    from swift_r1.record.reporters import Reporter, trackers
    from swift_r1.rewards import ORM, AsyncORM, orms


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("swift_r1.runtime.libraries").own_version()
    if name not in _HOME_OF:
        raise AttributeError(f"module 'swift_r1' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
