"""Beside an installed ms-swift: what plugins register in its registries is found here too."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from swift_r1.data.registry import DatasetMeta, datasets
from swift_r1.rewards import orms


@cache
def is_installed() -> bool:
    """Whether the real ms-swift is installed (another package of that module name does not count)."""
    try:
        files = distribution("ms-swift").files or []
    except PackageNotFoundError:
        return False
    return any(str(file) == "swift/cli/main.py" for file in files)


class Registries:
    """Its registries as they were before a plugin ran; `adopt` takes over what came since.

    Nothing of ms-swift is imported for this: what no plugin imported, no plugin registered in. Importing it takes
    many seconds.
    """

    def __init__(self) -> None:
        self._rewards = dict(_registry("swift.rewards", "orms"))
        self._datasets = dict(_registry("swift.dataset", "DATASET_MAPPING"))

    def adopt(self) -> None:
        """Registers here what is new there. Built-in ones that came with its import are left out."""
        for name, reward in _registry("swift.rewards", "orms").items():
            if self._rewards.get(name) is not reward and not _is_its_own(reward):
                orms[name] = reward
        for key, meta in _registry("swift.dataset", "DATASET_MAPPING").items():
            if self._datasets.get(key) is not meta and not _came_with_it(meta):
                ours = _as_ours(meta)
                datasets[ours.name] = ours


def _registry(module: str, name: str) -> dict[Any, Any]:
    if not is_installed():
        return {}
    return getattr(sys.modules.get(module), name, {})


def _is_its_own(entry: Any) -> bool:
    return str(getattr(entry, "__module__", "")).startswith("swift.")


def _came_with_it(meta: Any) -> bool:
    """Its hundreds of hub datasets have ids alone; a plugin's has a name, a path or a preprocessor of its own."""
    return meta.dataset_name is None and meta.dataset_path is None and _is_its_own(type(meta.preprocess_func))


def _as_ours(meta: Any) -> DatasetMeta:
    """Its `DatasetMeta` as ours. Preprocessors need no change: rows go through `columns` and `preprocess` alike."""
    loader = None if _is_its_own(meta.loader) else meta.loader
    return DatasetMeta(
        dataset_name=meta.dataset_name,
        ms_dataset_id=meta.ms_dataset_id,
        hf_dataset_id=meta.hf_dataset_id,
        dataset_path=meta.dataset_path,
        subsets=list(meta.subsets),
        split=list(meta.split),
        preprocess_func=meta.preprocess_func,
        loader=loader,
        tags=list(meta.tags),
        help=meta.help,
    )
