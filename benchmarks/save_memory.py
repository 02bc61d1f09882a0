"""Memory and time of a save: a random Llama in bf16 with AdamW's float32 state, one process, no GPU.

    python benchmarks/save_memory.py FOLDER [LAYERS]

Saves twice: to a disk that takes it, and under a limit of 1 MB a file, which refuses as a full disk does. Prints the
bytes that are saved, the process's memory before, and how much more the save took at its peak.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.checkpoint.saving import Saver
from swift_r1.training.checkpoint.state import Fingerprint, RunState
from swift_r1.training.optimizer import OptimizerConfig

MB = 10**6


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """A tokenizer's files are small."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("layers", type=int, nargs="?", default=12)
    args = parser.parse_args()
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    backend = LocalBackend(model, OptimizerConfig(1e-6, 0.0, 0.9, 0.95, 1e-8, 1.0))
    backend.step(1e-6)  # AdamW has no moments before its first step
    print(f"{sum(one.numel() for one in model.parameters()) / MB:.0f} M parameters")
    for name in ("saved", "refused"):
        folder: Path = args.folder / name
        folder.mkdir(parents=True)
        if name == "refused":
            resource.setrlimit(resource.RLIMIT_FSIZE, (MB, MB))
        measure(
            Saver(
                folder,
                backend,
                None,
                NoTokenizer(),
                Ranks(0, 1, torch.device("cpu"), None),
                1,
                True,
            ),
            name,
        )
        shutil.rmtree(folder)


def measure(saver: Saver, name: str) -> None:
    state = RunState(1, 1, 0, "", 1, 1, "id", 0, {}, {}, {}, None, {}, Fingerprint({}, 1, "", 1))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    started = time.perf_counter()
    saver.save(1, state, {}, last=False)
    seconds = time.perf_counter() - started
    more = memory("VmHWM") - before
    size = sum(path.stat().st_size for path in saver.run_dir.rglob("*") if path.is_file())
    peak = f"{before / MB:.0f} MB of memory, at the peak {more / MB:.0f} MB more"
    print(f"{name}: {size / MB:.0f} MB in {seconds:.1f} s; {peak}")


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


if __name__ == "__main__":
    main()
