"""Host memory for what leaves a device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import psutil
import torch
from torch import Tensor

from swift_r1.errors import RunFailed

_ALIGNED = 64  # bytes
_GIB = 2**30


class HostBlock:
    """One piece of host memory, pinned if `device` is a GPU. torch's own allocator of pinned memory rounds every piece
    up to a power of two, which may double it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda.cudart() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def parts(self, sizes: Sequence[int]) -> list[Tensor]:
        """Pieces of so many bytes, each time of the same memory unless it is too small. Nothing may use earlier ones.
        Raises RunFailed: the host has not so much."""
        ends = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        if ends[-1] > len(self._bytes):
            self._grow(ends[-1])
        return [self._bytes[start : start + size] for start, size in zip(ends, sizes, strict=False)]

    def _grow(self, nbytes: int) -> None:
        if self._cuda is not None and len(self._bytes):
            torch.cuda.synchronize()  # copies may still read it
            self._cuda.cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = torch.empty(0, dtype=torch.uint8)
        free = psutil.virtual_memory().available
        if nbytes > free:
            raise RunFailed(
                f"the host has {free / _GIB:.1f} GiB of free memory, and {nbytes / _GIB:.1f} GiB are to leave the "
                "device: leave out an --offload_... flag, or use more GPUs"
            )
        self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        if (
            self._cuda is not None
            and self._cuda.cudaHostRegister(self._bytes.data_ptr(), nbytes, 0) != 0
        ):
            raise RunFailed(
                f"CUDA cannot pin {nbytes / _GIB:.1f} GiB of host memory: leave out an --offload_... flag"
            )
