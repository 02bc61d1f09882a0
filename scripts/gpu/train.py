"""`python scripts/gpu/train.py SHAPE`: the training part of a step, as fast as it runs, and where its time goes.

Steps are timed one after another without waiting for the GPU in between, and one is recorded by torch's profiler. Then
the same with one thing changed at a time. The last step waits around each part, for their shares.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from chip import shown
from shapes import DTYPE, REHEARSES, model_folder

from swift_r1.models import block_functions, logprobs

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from step_ours import stepper  # noqa: E402
from step_work import Clock, Work, matmul_rate, peak_bytes, synchronize  # noqa: E402

STEPS = 1 if REHEARSES else 4
# prompts, completions of each, tokens of a prompt and of a completion
LONG, SHORT = ((1, 4, 16, 16), (2, 2, 8, 8)) if REHEARSES else ((8, 8, 128, 512), (64, 4, 64, 64))


def main() -> None:
    shape = sys.argv[1]
    work = made(shape, LONG)
    step, backend = stepper("ours", work)
    seconds = timed(step, STEPS)
    parameters = sum(weight.numel() for weight in backend.model.parameters())
    rate = matmul_rate(getattr(torch, DTYPE))
    shown(
        {"train s": seconds, "tokens/s": tokens(LONG) / seconds, "peak GiB": peak_bytes() / 2**30}
    )
    shown({"MFU": 6 * parameters * tokens(LONG) / seconds / rate, "matrix TFLOP/s": rate / 1e12})
    profile(step)
    for name, module, attribute, value in variants():
        with changed(module, attribute, value):
            timing = {f"{name}: s": timed(step, 1), f"{name}: peak GiB": peak_bytes() / 2**30}
            shown(timing | {f"{name}: GPU s": busy(step)[0]})
    short, _ = stepper("ours", made(shape, SHORT), backend)
    shown(
        {
            f"{SHORT[0]} groups of {SHORT[1]} x {SHORT[3]}: tokens/s": tokens(SHORT)
            / timed(short, STEPS)
        }
    )
    shares(step, backend)


def made(shape: str, sizes: tuple[int, int, int, int]) -> Work:
    prompts, generations, prompt, new = sizes
    rng = random.Random(0)

    def some(count: int) -> list[int]:
        return [rng.randrange(100, 500) for _ in range(count)]

    return Work(
        model=str(model_folder(shape)),
        dtype=DTYPE,
        prompt_ids=[some(prompt) for _ in range(prompts)],
        completion_ids=[some(new) for _ in range(prompts * generations)],
        generations=generations,
        new_tokens=new,
        micro=2 * generations if sizes == LONG else prompts * generations,
        max_tokens=None,
        steps=STEPS,
        generate=False,
        checkpointing=False,
    )


def tokens(sizes: tuple[int, int, int, int]) -> int:
    prompts, generations, prompt, new = sizes
    return prompts * (prompt + generations * new)


def timed(step: Callable[[], Any], steps: int) -> float:
    """Returns seconds per step, of several after one to warm up."""
    step()
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - started) / steps


def busy(step: Callable[[], Any]) -> tuple[float, int]:
    """Returns the seconds in which the GPU computes during a step, and how many kernels that are; what the host costs
    does not count."""
    if not torch.cuda.is_available():
        return 0.0, 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step()
        synchronize()
    kernels = [
        event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sum(event.device_time_total for event in kernels) / 1e6, len(kernels)


def shares(step: Callable[[], Any], backend: Any) -> None:
    """Prints the seconds of each part of a step. The backend waits around its parts from then on: this comes last."""
    clock = Clock()
    clock.wrap(backend, "logprobs", "forward s")
    clock.wrap(backend, "backward", "backward s")
    clock.wrap(backend, "step", "optimizer s")
    step()
    shown(clock.take())


def profile(step: Callable[[], Any]) -> None:
    """Prints the kernels that take longest, their sum and their number."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        step()
        synchronize()
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(
        found.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=70), flush=True
    )
    seconds, kernels = busy(step)
    shown({"GPU s": seconds, "kernels per step": kernels})


def variants() -> Iterator[tuple[str, ModuleType, str, Any]]:
    """Yields what is changed for a measurement: a name, and the attribute of a module with its other value."""
    for mebibytes in (1,) if REHEARSES else (128, 512, 4096):
        yield (
            f"logits of {mebibytes} MiB",
            logprobs,
            "logits_bytes",
            lambda _device, size=mebibytes << 20: size,
        )
    if REHEARSES:
        return
    fused = block_functions.FUSED
    yield "logits in bf16", logprobs, "WIDE_PRODUCTS", False
    for kernel in sorted(fused):
        yield f"without the kernel of the {kernel}", block_functions, "FUSED", fused - {kernel}
    yield "without kernels of our own", block_functions, "FUSED", set()


@contextmanager
def changed(module: ModuleType, attribute: str, value: Any) -> Iterator[None]:
    before = getattr(module, attribute)
    setattr(module, attribute, value)
    try:
        yield
    finally:
        setattr(module, attribute, before)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
