"""`python scripts/gpu/engine.py SHAPE`: one `swift rollout` with CUDA graphs, and all that is asked of an engine.

A trainer's model lies on the same GPU: tokens per second at several loads, log-probs against the trainer's, an update
by each transport, both levels of sleep. A figure is printed when it is there, whatever ends the server later.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from chip import copied, shown
from shapes import DTYPE, REHEARSES, model_folder

from swift_r1.models.loading import load_model
from swift_r1.models.weights import policy_weights
from swift_r1.rollout.remote import mean_difference, own_logprobs, probe_sequences
from swift_r1.sync.transport import HTTP, IPC, SHM
from swift_r1.sync.writer import WeightWriter
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest, SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from weight_sync import server

PROMPT, NEW, GROUP = (16, 16, 8) if REHEARSES else (128, 512, 8)
LOADS = (8,) if REHEARSES else (64, 256, 1024)
# of keys and values: 1,024 completions of 640 tokens of the 1.5B
KEPT_BYTES = (64 << 20) if REHEARSES else (24 << 30)


def main() -> None:
    shape, *words = sys.argv[1:]
    model = model_folder(shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kwargs: dict[str, Any] = {"kv_cache_memory_bytes": KEPT_BYTES}
    if not REHEARSES:
        kwargs["enable_sleep_mode"] = True
    flags = [
        "--vllm_gpu_memory_utilization",
        "0.6",
        "--vllm_engine_kwargs",
        json.dumps(kwargs),
        *words,
    ]
    started = time.perf_counter()
    with server(str(model), DTYPE, *flags, output=None) as client, WeightWriter(client) as writer:
        shown({"start s": time.perf_counter() - started})
        backend = LocalBackend(
            load_model(str(model), DTYPE, False).to(device),
            OptimizerConfig(1e-6, 0.0, 0.9, 0.99, 1e-8, 1.0),
        )
        part = Engine(client, writer, backend, device)
        part.compare("as loaded")
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        bandwidth = copied()
        first, *others = (SHM, HTTP) if REHEARSES else (IPC, SHM, HTTP)
        part.push(first, size)
        for load in LOADS:
            part.generate(load, size / bandwidth)
        for transport in others:
            part.push(transport, size)
        for level in () if REHEARSES else (1, 2):
            part.sleep(level, size)


class Engine:
    """The server and the trainer's model, with what is measured of them."""

    def __init__(
        self,
        client: RolloutClient,
        writer: WeightWriter,
        backend: LocalBackend,
        device: torch.device,
    ) -> None:
        self.client, self.writer, self.backend, self.device = client, writer, backend, device
        self.version = client.info().weight_version
        self._asked = 0

    def ask(self, count: int, new: int) -> list[RolloutOutput]:
        """Returns `count` completions of `new` tokens, generated at once in groups of 8."""
        self._asked += 1
        sampling = SamplingParams(max_tokens=new, ignore_eos=True)
        return self.client.generate(
            [
                RolloutRequest(
                    request_id=f"{self._asked}/{number}",
                    prompt_token_ids=tuple(range(100 + number, 100 + number + PROMPT)),
                    n=GROUP,
                    seeds=tuple(range(GROUP * number, GROUP * number + GROUP)),
                    sampling=sampling,
                )
                for number in range(count // GROUP)
            ]
        )

    def generate(self, count: int, seconds_per_token: float) -> None:
        """Prints tokens per second, and the share of what reading the weights once per token would allow."""
        self.ask(count, 8)
        seconds = timed(lambda: self.ask(count, NEW))
        share = NEW * seconds_per_token / seconds
        shown(
            {
                f"{count} at once: tokens/s": count * NEW / seconds,
                f"{count} at once: of bandwidth": share,
            }
        )

    def compare(self, when: str) -> None:
        """Prints the mean difference of log-probs between engine and trainer: on sampled tokens as they came with them,
        and on tokens from all over the vocabulary as the engine scores them."""
        (output,) = self.ask(GROUP, NEW // 4)
        sampled = [(*range(100, 100 + PROMPT), *one.token_ids) for one in output.completions]
        own = own_logprobs(self.backend, sampled, self.device)
        given = [one.logprobs for one in output.completions]
        written = [row[-len(theirs) :] for row, theirs in zip(own, given, strict=True)]
        probes = probe_sequences(self.backend.model.config)
        scored = self.client.score(probes).logprobs
        shown({f"{when}: logp diff, sampled": mean_difference(given, written)})
        shown(
            {
                f"{when}: logp diff, random": mean_difference(
                    scored, own_logprobs(self.backend, probes, self.device)
                )
            }
        )

    def push(self, transport: str, size: int) -> None:
        """Changes all weights a little and prints the GB per second of the second update."""
        for _ in range(2):
            with torch.no_grad():
                for weight in self.backend.model.parameters():
                    weight.mul_(1.001)
            seconds = timed(lambda: self._send(transport))
        shown({f"push {transport}: s": seconds, f"push {transport}: GB/s": size / 1e9 / seconds})
        self.compare(f"pushed by {transport}")

    def _send(self, transport: str) -> None:
        self.version += 1
        buckets = self.backend.weight_buckets(
            policy_weights(self.backend.model), on_host=transport != IPC
        )
        self.writer.push(self.version, buckets, transport)

    def sleep(self, level: int, size: int) -> None:
        """Prints how long the engine takes to sleep and wake, what it frees, and how it compares after an update."""
        before = free_gib()
        shown({f"sleep {level}: s": timed(lambda: self.writer.sleep(level))})
        shown({f"sleep {level}: GiB freed": free_gib() - before})
        shown({f"sleep {level}: wake s": timed(self.writer.wake)})
        if level == 1:
            self.compare("slept 1")
        self.push(SHM if REHEARSES else IPC, size)


def timed(work: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
