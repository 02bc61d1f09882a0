"""Memory of one long completion whose tokens are spread over ranks: a random Llama in float32, no GPU.

    python benchmarks/sequence_memory.py [TOKENS] [--no_checkpointing]

Forward and backward pass of one completion on one process, then on two that share it (`--sequence_parallel_size 2`).
Prints each process's memory before (weights, gradients, libraries), how much more it held at its peak, and the seconds.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swift_r1.models.loading import prepare
from swift_r1.models.policy import Policy
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks, join_ranks
from swift_r1.training.batching import collate, round_batch
from swift_r1.training.micro_batches import Form

MB = 10**6
PROMPT = 512  # tokens
VOCABULARY = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=int, nargs="?", default=8192)
    parser.add_argument("--no_checkpointing", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.tokens, not args.no_checkpointing)
        return
    more = []
    for ranks in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free.getsockname()[1]),
                "WORLD_SIZE": str(ranks),
            }
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
        environ = (
            os.environ
            | meeting
            | {"OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)}
        )
        started = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env=environ | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [process.communicate(timeout=1200)[0].split() for process in started]
        before, peak, seconds = (max(map(float, column)) for column in zip(*said, strict=True))
        more.append(peak - before)
        print(
            f"{ranks} process(es): {before:.0f} MB before, {more[-1]:.0f} MB more at the peak, {seconds:.1f} s"
        )
    print(f"{args.tokens} tokens on two ranks: {more[1] / more[0]:.2f} of the memory per process")


def measure(tokens: int, checkpointing: bool) -> None:
    size = int(os.environ["WORLD_SIZE"])
    ranks: Ranks = join_ranks(1200, distributed=size > 1, sequence_parallel_size=size)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=tokens,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    prepare(model, checkpointing)
    policy = Policy(model.train())
    step(policy, ranks, 64)  # what libraries set up, and the gradients
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    started = time.perf_counter()
    step(policy, ranks, tokens)
    seconds = time.perf_counter() - started
    print(before / MB, memory("VmHWM") / MB, seconds)
    ranks.close()


def step(policy: Policy, ranks: Ranks, tokens: int) -> None:
    prompt = min(PROMPT, tokens // 2)
    row = (torch.arange(tokens) * 7919 % VOCABULARY).tolist()
    batch = round_batch([TokenSequence.of_answer(row[:prompt], row[prompt:])], [0.0])
    micro = collate(batch, [(0,)], Form(packed=True), ranks.device, sequence=ranks.sequence)
    policy(1.0, *micro.inputs).logps.mean().backward()


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


if __name__ == "__main__":
    main()
