"""How much memory this process has used at most."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

GIB = 2**30


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held: of the GPU, or of the host where there is none.

    From the kernel's high-water mark of this program's own memory; getrusage's is inherited from the program before it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
