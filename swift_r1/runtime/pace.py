"""How fast a rank computes for itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Pace:
    """The time of this rank's forward passes, which wait for no other rank unless parameters are partitioned."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._tokens = 0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def timed(self, tokens: int) -> Iterator[None]:
        """Times a forward pass of so many tokens; nothing waits for the device."""
        self._tokens += tokens
        if self._on_gpu:
            event: Any = torch.cuda.Event  # torch has no types here
            begin = event(enable_timing=True)
            end = event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    def take(self) -> float:
        """Seconds a token since the last call, 0 where there was none; waits until the device has done them."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        found = self._seconds / self._tokens if self._tokens else 0.0
        self._seconds = 0.0
        self._tokens = 0
        self._events = []
        return found
