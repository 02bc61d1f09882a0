"""Registries of reward models: plugin files may fill them, nothing here reads them (`--reward_model` is refused)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PRM:
    """A process reward model, which scores the steps of requests."""

    def __call__(self, **kwargs: Any) -> list[Any]:
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


prms: dict[str, Callable[..., Any]] = {}
rm_plugins: dict[str, Callable[..., Any]] = {}
