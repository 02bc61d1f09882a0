"""What a run does with all of a model's weights, by their number: load, push to a server, save, resume.

    python benchmarks/growth_parameters.py [--sizes 0.6M 5M 25M 135M] [--backends local fsdp2 zero3]
                                           [--train full] [--folder /tmp] [--plot]

Models of Qwen2's architecture with random bf16 weights and float32 masters (`--train lora`: adapters over frozen
weights, for models whose optimizer state does not fit). Each is loaded, takes a step, is pushed to a server by `shm`
and `http`, saved, and resumed in another process; `fsdp2` and `zero3` on two ranks. The server is the real one, which
takes the weights into shared memory and checks their hashes, over an engine that does nothing with them.

Columns: CPU seconds of rank 0 (one thread), and the most memory (MB) that it held in addition to what it held before
and to the copy of the weights that it keeps for servers that come back (by `shm` that copy is in shared memory).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from growth_plot import growth
from growth_tools import MB, SIZES, config_of, free_port, measured, run_ranks, write_model

from swift_r1.flags.adapters import AdapterArguments
from swift_r1.flags.server import RolloutArguments
from swift_r1.models.expected import expected_weights
from swift_r1.models.loading import load_model
from swift_r1.models.policy import Policy
from swift_r1.rollout.pool.pool import ServerPool
from swift_r1.rollout.pool.session import Expected, ServerSession
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.processes import leave, stop_at_once
from swift_r1.runtime.ranks import Ranks, join_ranks
from swift_r1.serving import server
from swift_r1.serving.engines.base import EngineInfo
from swift_r1.sync.transport import HTTP, SHM
from swift_r1.sync.writer import WeightWriter
from swift_r1.training.backends.base import Backend
from swift_r1.training.batching import collate, round_batch
from swift_r1.training.checkpoint.folder import newest_whole
from swift_r1.training.checkpoint.saving import OPTIMIZER, Saver
from swift_r1.training.checkpoint.state import STATE, Fingerprint, RunState
from swift_r1.training.checkpoint.tensors import SavedTensors
from swift_r1.training.micro_batches import Form
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.client import RolloutClient

SECONDS = {
    "load_s": "load",
    "shm_s": "push, shm",
    "http_s": "push, http",
    "save_s": "save",
    "verify_s": "check of hashes",
    "resume_s": "resume",
}
MEMORY = {
    "saved_MB": "checkpoint",
    **{name.replace("_s", "_MB"): label for name, label in SECONDS.items()},
}


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """A tokenizer's files are small."""


class Sink:
    """An engine that does nothing with the weights that it gets."""

    dead, scores_alone = False, False

    def __init__(self, size: str) -> None:
        self.info = EngineInfo("sink", "0", config_of(size).vocab_size, "none", 1024, "bfloat16")

    async def load_weights(self, files: Sequence[Path], version: int) -> None: ...

    def shutdown(self) -> None: ...


def serve(size: str, folder: Path, port: int) -> int:
    stop_at_once()
    server.load_engine = lambda config: (Sink(size), expected_weights(config.model))  # type: ignore[assignment]
    config = RolloutArguments.from_dict({"model": str(folder), "port": port})
    return asyncio.run(server.serve(config, server.bind(config.host, port)))


def open_backend(name: str, folder: Path, train: str, ranks: Ranks) -> Backend:
    optimizer = OptimizerConfig(1e-6, 0.0, 0.9, 0.95, 1e-8, 1.0)
    lora = (
        AdapterArguments(
            train_type="lora", lora_rank=8, lora_alpha=16, target_modules=["all-linear"]
        )
        if train == "lora"
        else None
    )

    def load() -> Any:
        return load_model(folder, "bfloat16", False, lora)

    if name == "local":
        from swift_r1.training.backends.local import LocalBackend

        return LocalBackend(load(), optimizer)
    if name == "ddp":
        from swift_r1.training.backends.ddp import DdpBackend

        return DdpBackend(load(), optimizer, ranks)
    if name.startswith("fsdp"):
        from swift_r1.training.backends.fsdp import FsdpBackend
        from swift_r1.training.backends.fsdp_config import read_fsdp

        return FsdpBackend(load, optimizer, read_fsdp(name), ranks, Policy)
    from swift_r1.training.backends.deepspeed import DeepSpeedBackend
    from swift_r1.training.backends.deepspeed_config import read_config

    return DeepSpeedBackend(load, torch.bfloat16, optimizer, read_config(name), ranks)


def take_step(backend: Backend, tokens: int = 32) -> None:
    row = (torch.arange(2 * tokens) % backend.vocab_size).tolist()
    batch = round_batch([TokenSequence.of_answer(row[:tokens], row[tokens:])], [0.0])
    inputs = collate(batch, [(0,)], Form(packed=True), backend.device).inputs
    backend.backward(backend.logprobs(inputs, 1.0).logps.mean(), True)
    backend.step(1e-6)


def part(args: argparse.Namespace) -> dict[str, float]:
    """What this rank measures."""
    ranks = join_ranks(600, distributed=args.backend != "local")
    folder, run_dir, row = args.folder / "model", args.folder / "run", {}
    with measured() as load:
        backend = open_backend(args.backend, folder, args.train, ranks)
    row |= load.as_row("load")
    if args.part == "resume":
        with measured() as checked:
            found = newest_whole(run_dir) if ranks.is_rank0 else None
            ranks.barrier()
        assert found is not None or not ranks.is_rank0
        with measured() as resume:
            backend.load_training_state(SavedTensors(run_dir / "checkpoint-1" / STATE, OPTIMIZER))
        ranks.close()
        return checked.as_row("verify") | resume.as_row("resume")
    take_step(backend)
    for transport in (SHM, HTTP):
        row |= push(backend, ranks, transport, args)
    saver = Saver(run_dir, backend, None, NoTokenizer(), ranks, 1, True)
    state = RunState(1, 1, 0, "", 1, 1, "id", 0, {}, {}, {}, None, {}, Fingerprint({}, 1, "", 1))
    with measured() as save:
        saver.save(1, state, {}, last=True)
    ranks.close()
    return row | save.as_row("save")


def push(
    backend: Backend, ranks: Ranks, transport: str, args: argparse.Namespace
) -> dict[str, float]:
    """Twice: the first push keeps a copy, of which the second one writes over."""
    with served(backend, transport, args) if ranks.is_rank0 else nullcontext() as pool:
        rollouts = ServerRollouts(pool, backend, ranks)
        with measured() as first:
            rollouts.publish_weights()
        with measured() as again:
            rollouts.publish_weights()
    ranks.barrier()
    return {
        f"{transport}_first_s": first.seconds,
        f"{transport}_s": again.seconds,
        f"{transport}_MB": max(first.more - first.kept, again.more) / MB,
        f"{transport}_kept_MB": first.kept / MB,
    }


@contextmanager
def served(backend: Backend, transport: str, args: argparse.Namespace) -> Iterator[ServerPool]:
    """A server in a process of its own, which ends with this."""
    port = free_port()
    words = [
        sys.executable,
        sys.argv[0],
        "--part",
        "serve",
        "--size",
        args.size,
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        [*words, "--folder", str(args.folder / "model")], stderr=subprocess.DEVNULL
    )
    try:
        with RolloutClient(f"http://127.0.0.1:{port}") as client:
            client.wait_until_ready(120)
            writer = WeightWriter(client)
            writer.hold(10)
            session = ServerSession(
                writer, Expected("", "none", backend.vocab_size, None), 60, transport
            )
            with closing(ServerPool([session], 60, transport, compare=False)) as pool:
                yield pool
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.6M", "5M", "25M", "135M"])
    parser.add_argument("--backends", nargs="+", default=["local", "fsdp2", "zero3"])
    parser.add_argument("--train", choices=["full", "lora"], default="full")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="with room for checkpoints"
    )
    parser.add_argument(
        "--plot", action="store_true", help="draw docs/images/growth-parameters.svg (of local)"
    )
    for name in ("--part", "--size", "--backend"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    if args.part == "serve":
        leave(serve(args.size, args.folder, args.port))
    if args.part is not None:
        print("\n" + json.dumps(part(args)))
        return
    rows = []
    for size in args.sizes:
        for backend in args.backends:
            folder = Path(tempfile.mkdtemp(prefix="growth-", dir=args.folder))
            try:
                parameters = write_model(folder / "model", size)
                (folder / "run").mkdir()
                words = [
                    "--folder",
                    str(folder),
                    "--size",
                    size,
                    "--backend",
                    backend,
                    "--train",
                    args.train,
                ]
                count = 1 if backend == "local" else 2
                one, two = (
                    run_ranks([*words, "--part", name], count)[0] for name in ("save", "resume")
                )
                saved = sum(
                    path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file()
                )
            finally:
                shutil.rmtree(folder)
            found = {
                "parameters": parameters,
                "backend": backend,
                "saved_MB": saved / MB,
                **one,
                **two,
            }
            rows.append(found)
            print(json.dumps(found), flush=True)
    for backend in args.backends:
        own = [row for row in rows if row["backend"] == backend]
        print(f"{backend}: CPU seconds, and MB at rank 0's peak")
        growth(
            "parameters",
            "parameters",
            own,
            SECONDS,
            y_label="CPU seconds",
            plot=args.plot and backend == "local",
        )
        growth("parameters", "parameters", own, MEMORY, plot=False)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
