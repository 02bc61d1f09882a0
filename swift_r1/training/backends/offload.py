"""`--offload_ref_model`: a module whose weights are in host memory but while it works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Home:
    """A frozen module and where it lives: on the device for good, or with `offload` on the host between its uses.

    Where everything is on the host anyway nothing moves.
    """

    def __init__(self, module: nn.Module, offload: bool) -> None:
        self.module = module.cpu() if offload else module
        self._offload = offload

    @contextmanager
    def at_work(self, device: torch.device) -> Iterator[None]:
        """The weights are on `device` while this is open."""
        if self._offload:
            self.module.to(device)
        try:
            yield
        finally:
            if self._offload:
                self.module.cpu()
