"""The work that both sides of `train_step.py` do, and how it is measured. Needs torch only."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Work:
    """`prompts` x `generations` completions of `new_tokens` tokens each, in `micro` completions at a time."""

    model: str
    dtype: str
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    generations: int
    new_tokens: int
    micro: int
    max_tokens: int | None
    steps: int
    generate: bool
    checkpointing: bool

    @staticmethod
    def read(path: str) -> Work:
        return Work(**json.loads(Path(path).read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@dataclass
class Clock:
    """Seconds by part; on a GPU it waits for the work to be done."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        synchronize()
        started = time.perf_counter()
        try:
            yield
        finally:
            synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def wrap(self, owner: object, method: str, name: str) -> None:
        """Times every call of `owner.method`."""
        inner: Callable = getattr(owner, method)

        def timed(*args, **kwargs):
            with self.part(name):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes() -> int:
    """Of the device where there is one, else of the process (with the interpreter and its libraries)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a plain matrix product here: what model-FLOP utilisation is measured against."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 2048
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(6):
        synchronize()
        started = time.perf_counter()
        a @ a
        synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def report(
    steps: list[dict[str, float]],
    peak: int,
    generate: float | None,
    model: torch.nn.Module,
    dtype: str,
) -> None:
    """Writes the worker's one line of JSON to standard output."""
    result = {
        "steps": steps,
        "peak": peak,
        "generate": generate,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "matmul_rate": matmul_rate(getattr(torch, dtype)),
    }
    print("RESULT " + json.dumps(result), flush=True)
