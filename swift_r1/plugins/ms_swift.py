"""Beside an installed ms-swift: plugins get its classes, and what they register in its registries is found here too."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from swift_r1.data.registry import DatasetMeta, SubsetDataset, datasets
from swift_r1.data.sampler import samplers
from swift_r1.data.tool_registry import tools
from swift_r1.plugins.agents import agents
from swift_r1.plugins.protocol import prms, rm_plugins
from swift_r1.plugins.rollouts import context_managers, envs, multi_turns
from swift_r1.record.reporters import trackers
from swift_r1.rewards import orms

_MODULES = (
    *(
        "swift.rewards",
        "swift.rewards.rm_plugin",
        "swift.rewards.orm",
        "swift.dataset",
        "swift.rollout",
    ),
    *("swift.infer_engine", "swift.infer_engine.protocol", "swift.template", "swift.utils"),
)
"""Where version 4 has what version 3 has under other modules."""
REGISTRIES: Mapping[str, tuple[dict[str, Any], str, str]] = {
    "reward": (orms, "swift.rewards.orm", "orms"),
    "dataset": (datasets, "swift.dataset", "DATASET_MAPPING"),
    "scheduler": (multi_turns, "swift.rollout.multi_turn", "multi_turns"),
    "environment": (envs, "swift.rollout.gym_env", "envs"),
    "process reward": (prms, "swift.rewards.prm", "prms"),
    "reward model": (rm_plugins, "swift.rewards.rm_plugin", "rm_plugins"),
    "context manager": (context_managers, "swift.rollout.gym_env", "context_managers"),
    "sampler": (samplers, "", ""),  # which it has not
    "tool": (tools, "", ""),
    "agent": (agents, "", ""),
    "tracker": (trackers, "", ""),
}
"""What plugins register, and where: our registry, and the module of ms-swift that makes its own, and its name there."""


@cache
def is_installed() -> bool:
    """Returns whether the real ms-swift is installed (another package of that module name does not count)."""
    try:
        files = distribution("ms-swift").files or []
    except PackageNotFoundError:
        return False
    return any(str(file) == "swift/cli/main.py" for file in files)


def its_own(name: str) -> Any:
    """Returns the installed ms-swift's object of a name, in whatever module its version has it; None without one."""
    found = (getattr(importlib.import_module(module), name, None) for module in _MODULES)
    return next((one for one in found if one is not None), None)


@contextmanager
def adopting() -> Iterator[None]:
    """Registers here what a plugin, run in the block, registers there. What came with ms-swift's import is left out.

    Nothing of ms-swift is imported for this: what no plugin imported, no plugin registered in. Importing it takes
    many seconds.
    """
    befores = {
        kind: dict(_registry(module, name)) for kind, (_, module, name) in REGISTRIES.items()
    }
    yield
    for kind, (ours, module, name) in REGISTRIES.items():
        new = {
            key: entry
            for key, entry in _registry(module, name).items()
            if befores[kind].get(key) is not entry
        }
        if kind == "dataset":
            ours.update(
                (meta.name, meta) for meta in map(_as_ours, filter(_is_a_plugins, new.values()))
            )
        else:
            ours.update({key: entry for key, entry in new.items() if not _is_its_own(entry)})


def _registry(module: str, name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = getattr(sys.modules.get(module), name, {}) if is_installed() else {}
    return found


def _is_its_own(entry: Any) -> bool:
    return str(getattr(entry, "__module__", "")).startswith("swift.")


def _is_a_plugins(meta: Any) -> bool:
    """Not one of its hundreds of hub datasets: a plugin's has its own data or code."""
    return meta.dataset_path is not None or not (
        _is_its_own(meta.loader) and _is_its_own(meta.preprocess_func)
    )


def _as_ours(meta: Any) -> DatasetMeta:
    """Its `DatasetMeta` as ours. Preprocessors need no change: `columns` and `preprocess` are the same."""
    return DatasetMeta(
        dataset_name=meta.dataset_name,
        ms_dataset_id=meta.ms_dataset_id,
        hf_dataset_id=meta.hf_dataset_id,
        dataset_path=meta.dataset_path,
        subsets=[
            SubsetDataset(one.name, one.subset, one.split, one.preprocess_func, one.is_weak_subset)
            if one.name != "default" or one.preprocess_func is not None
            else "default"
            for one in meta.subsets
        ],
        split=list(meta.split),
        preprocess_func=meta.preprocess_func,
        loader=None if _is_its_own(meta.loader) else meta.loader,
        tags=list(meta.tags),
        help=meta.help,
    )
