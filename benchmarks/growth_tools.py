"""What the growth benchmarks share: random models of real shapes, the memory of a process, and processes as ranks."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from swift_r1.training.checkpoint.tensors import write_stream

MB = 10**6
_SHAPES = {  # width, feed-forward, layers, heads, key-value heads, vocabulary
    "0.6M": (128, 384, 3, 4, 4, 64),
    "5M": (256, 1024, 4, 8, 4, 2048),
    "25M": (512, 1536, 8, 8, 4, 2048),
    "135M": (576, 1536, 30, 9, 3, 49152),  # SmolLM2's
    "0.5B": (896, 4864, 24, 14, 2, 151936),  # these are Qwen2.5's
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "3B": (2048, 11008, 36, 16, 2, 151936),
}
SIZES = tuple(_SHAPES)


def config_of(size: str) -> Qwen2Config:
    width, forward, layers, heads, shared, vocabulary = _SHAPES[size]
    return Qwen2Config(
        hidden_size=width,
        intermediate_size=forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        vocab_size=vocabulary,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )


def write_model(folder: Path, size: str) -> int:
    """A model folder of random bf16 weights, without a tokenizer, of which one tensor at a time is in memory; returns
    how many parameters it has."""
    with torch.device("meta"):
        empty = dict(
            Qwen2ForCausalLM._from_config(config_of(size), dtype=torch.bfloat16).named_parameters()
        )
    noise = 0.02 * torch.randn(2**20, generator=torch.Generator().manual_seed(0))

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name, like in empty.items():
            many = noise.repeat(-(-like.numel() // len(noise)))[: like.numel()].view(like.shape)
            yield name, (torch.ones(like.shape) if "norm" in name else many).bfloat16()

    folder.mkdir(parents=True)
    config_of(size).save_pretrained(folder)
    write_stream(folder / "model.safetensors", list(empty.items()), values())
    return sum(one.numel() for one in empty.values())


@dataclass(slots=True)
class Measured:
    """A piece of work: the process's CPU seconds, which other work on the machine does not change, and how many bytes
    more than before it held at the peak (`more`) and afterwards (`kept`)."""

    seconds: float = 0.0
    more: int = 0
    kept: int = 0

    def as_row(self, name: str) -> dict[str, float]:
        return {
            f"{name}_s": self.seconds,
            f"{name}_MB": self.more / MB,
            f"{name}_kept_MB": self.kept / MB,
        }


@contextmanager
def measured() -> Iterator[Measured]:
    """Of this process's own memory, looked at every few milliseconds: pages of files that it has mapped do not count,
    since the system takes them back at any time."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    found, before, ended = Measured(), own_memory(), threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            found.more = max(found.more, own_memory() - before)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    started = time.process_time()
    try:
        yield found
    finally:
        found.seconds = time.process_time() - started
        ended.set()
        thread.join()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        found.kept = own_memory() - before
        found.more = max(found.more, found.kept)


def own_memory() -> int:
    """Bytes of anonymous memory that this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def run_ranks(words: Sequence[str], ranks: int, limit_s: float = 1200) -> list[dict[str, Any]]:
    """What each of the processes that run this script with `words` prints as its last line, JSON. Raises RuntimeError
    where one fails."""
    environ = os.environ | {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)},
        # CPU seconds are those of the work, without threads that wait for each other
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        # What is freed goes back at once, so that the peak is of what was held.
        **({"MALLOC_MMAP_THRESHOLD_": "262144"} if ranks > 1 else {}),
    }
    command = [sys.executable, sys.argv[0], *words]
    processes = [
        subprocess.Popen(
            command,
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=limit_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{' '.join(words)} failed")
    return [json.loads(text.splitlines()[-1]) for text in said]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as Markdown, numbers to three digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        names,
        ["---"] * len(names),
        *([_shown(row.get(name)) for name in names] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)
