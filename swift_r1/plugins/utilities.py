"""Small helpers that ms-swift's plugins import."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from swift_r1.plugins.protocol import InferRequest


def get_logger(*_: Any, **__: Any) -> logging.Logger:
    """The logger of plugins. ms-swift's arguments (file, level) have no effect here."""
    return logging.getLogger("swift_r1.plugin")


remove_response = InferRequest.remove_response


def to_device(data: Any, device: Any, non_blocking: bool = False) -> Any:
    """A copy of nested dicts, lists and tuples with every tensor in them on `device`; other values as they are."""
    if isinstance(data, Mapping):
        return type(data)({key: to_device(value, device, non_blocking) for key, value in data.items()})
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device, non_blocking) for value in data)
    if hasattr(data, "to") and hasattr(data, "device"):
        return data.to(device=device, non_blocking=non_blocking)
    return data
