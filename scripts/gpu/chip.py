"""`python scripts/gpu/chip.py machine|rates`: what there is, and what the chip can do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shapes import REHEARSES


def main() -> None:
    {"machine": machine, "rates": rates}[sys.argv[1]]()


def shown(figures: dict[str, Any]) -> None:
    """Prints figures as the kit reads them, at once: what is ended later has shown them."""
    print("RESULT " + json.dumps(figures), flush=True)


def device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> None:
    """Prints versions and devices; each library does a little on the device. SystemExit at the end where one fails."""
    if not REHEARSES:
        subprocess.run(["nvidia-smi"], timeout=60, check=False)
    import torch

    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        about = [
            torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())
        ]
        found["gpus"] = [
            f"{one.name}, {one.total_memory / 2**30:.0f} GiB, sm_{one.major}{one.minor}"
            for one in about
        ]
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for folder in ("/dev/shm", "/tmp"):
        found[f"{folder} GiB free"] = round(shutil.disk_usage(folder).free / 2**30, 1)
    found["compiler"] = shutil.which("gcc") or "none"
    faults = (
        []
        if REHEARSES or torch.cuda.is_available()
        else ["torch sees no GPU: is the driver new enough for it?"]
    )
    for name, check in (
        ("matrix product", _product),
        ("4-bit linear", _four_bits),
        ("compile", _compiled),
    ):
        try:
            found[name] = check()
        except Exception as error:  # noqa: BLE001  each is tried whatever the others do; all are reported
            faults.append(
                f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
    for package in (
        "transformers",
        "triton",
        "vllm",
        "deepspeed",
        "bitsandbytes",
        "flash_attn",
        "peft",
        "flashinfer",
    ):
        if find_spec(package) is None:
            found[package] = "not installed"
            continue
        try:
            found[package] = getattr(import_module(package), "__version__", "imported")
        except Exception as error:  # noqa: BLE001  as above
            faults.append(f"import {package}: {type(error).__name__}: {str(error)[:200]}")
    shown(found)
    if faults:
        raise SystemExit("; ".join(faults))


def _product() -> float:
    """The largest error of a bf16 product on the device against float64 on the host."""
    import torch

    a, b = (
        torch.randn(512, 512, generator=torch.Generator().manual_seed(one)).bfloat16()
        for one in (0, 1)
    )
    error = (
        ((a.to(device()) @ b.to(device())).double().cpu() - a.double() @ b.double())
        .abs()
        .max()
        .item()
    )
    if error > 1.0:
        raise ArithmeticError(f"off by {error}")
    return error


def _four_bits() -> str:
    import torch

    if find_spec("bitsandbytes") is None:
        return "not installed"
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to(device())
    return f"mean {layer(torch.ones(2, 64, device=device())).abs().mean().item():.3f}"


def _compiled() -> str:
    """torch.compile needs Triton, and Triton a C compiler and Python's headers: vLLM's graphs do too."""
    import torch

    if REHEARSES:
        return "not tried"
    function: Any = torch.compile(lambda x: torch.sin(x) * 2 + 1)
    x = torch.ones(1024, device=device())
    torch.testing.assert_close(function(x), torch.sin(x) * 2 + 1)
    return "works"


def rates() -> None:
    """Prints the best of several: matrix products on random data in TFLOP/s, and copies in GB/s (on the device read +
    written)."""
    import torch

    where, size, nbytes = (
        device(),
        512 if REHEARSES else 8192,
        (1 << 22) if REHEARSES else (1 << 29),
    )
    found = {}
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for name, dtype in kinds.items():
        a = torch.randn(size, size, device=where).to(dtype)
        found[f"{name} TFLOP/s"] = 2 * size**3 / best(lambda a=a: a @ a) / 1e12
    found["device copy GB/s"] = copied() / 1e9
    here = torch.ones(nbytes, dtype=torch.uint8, device=where)
    for name, pinned in (("pinned", where.type == "cuda"), ("pageable", False)):
        host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)
        found[f"to device, {name} GB/s"] = nbytes / best(lambda host=host: here.copy_(host)) / 1e9
        found[f"to host, {name} GB/s"] = nbytes / best(lambda host=host: host.copy_(here)) / 1e9
    shown(found)


def copied() -> float:
    """Bytes a second, read and written, of a copy on the device."""
    import torch

    here = torch.ones((1 << 22) if REHEARSES else (2 << 30), dtype=torch.uint8, device=device())
    other = torch.empty_like(here)
    return 2 * here.numel() / best(lambda: other.copy_(here))


def best(work: Callable[[], Any], times: int = 8) -> float:
    """Seconds of the fastest of `times`, after two to warm up."""
    import torch

    found = []
    for _ in range(times + 2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found[2:])


if __name__ == "__main__":
    main()
