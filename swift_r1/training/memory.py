"""How much memory this process has used at most."""

from __future__ import annotations

import re
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


def out_of_memory(error: BaseException) -> str | None:
    """What could not be had, in words, where `error` says that memory ended; None for other errors."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, torch.OutOfMemoryError):
        tried = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
        return f"{tried[1]} more did not fit on the GPU" if tried else "the GPU is full"
    if isinstance(error, MemoryError):
        return text or "Python got no more memory"
    # torch has no class of its own for this on a CPU.
    if type(error) is RuntimeError and "DefaultCPUAllocator" in text:
        tried = re.search(r"allocate (\d+) bytes", text)
        return f"{int(tried[1]) / GIB:.2f} GiB more were not to be had" if tried else text
    return None
