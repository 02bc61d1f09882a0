"""What a worker of an engine with tensor parallelism reads of a bucket: vLLM takes its shard of each tensor."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from swift_r1.serving.engines.vllm_worker import _read

ROWS, COLUMNS = 8192, 1024  # 32 MiB


def mapped_kib(path: Path) -> int:
    """How much of a file this process has read through its memory map."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


def test_a_worker_reads_its_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "bucket"
    save_file(
        {"weight": torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)}, path
    )
    for name, tensor in _read([str(path)]):
        assert name == "weight" and mapped_kib(path) < 1024
        shard = tensor.narrow(0, ROWS // 4, ROWS // 4).clone()
        assert shard[0, 0] == ROWS // 4 * COLUMNS
        assert ROWS * COLUMNS // 1024 <= mapped_kib(path) < ROWS * COLUMNS * 4 // 1024 // 3
