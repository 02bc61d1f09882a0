"""How many weights a step changes, and what sending only those costs, against whole pushes by HTTP.

    python benchmarks/weight_delta.py --model models/smollm2-135m --learning_rate 5e-7 1e-6 --steps 6
    python benchmarks/weight_delta.py --no_server          # counts and bytes alone

A policy-gradient step (AdamW on float32 masters, weights in --torch_dtype) on tokens drawn at random with advantages
of both signs, so that gradients are as noisy as those of a run; then a push of the changes and one of everything, each
to a real `swift rollout` of its own. `prepare` is the trainer's copy, comparison and hash; `push` all of it, to a
server that serves. The learning rate is constant from the first step, where AdamW moves every weight by all of it:
later steps of a run, and those of a warm-up, change fewer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

from weight_sync import server

from swift_r1.sync.snapshot import SnapshotReader, WeightSnapshot
from swift_r1.sync.writer import WeightWriter

BATCH, LENGTH = 8, 64


def train_step(backend: Any, rate: float, generator: Any) -> None:
    import torch

    from swift_r1.models.policy import ModelInputs

    size = backend.model.config.get_text_config().vocab_size
    tokens = torch.randint(0, size, (BATCH, LENGTH), generator=generator)
    positions = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)[:, :-1].flatten()
    logps = backend.logprobs(ModelInputs(tokens, positions, tokens[:, 1:].flatten()), 1.0).logps
    advantages = torch.randn(BATCH, 1, generator=generator).expand(BATCH, LENGTH - 1).flatten()
    backend.backward(-(advantages * logps).mean(), last=True)
    backend.step(rate)


def keep(kept: WeightSnapshot, backend: Any, version: int, compare: bool) -> float:
    from swift_r1.models.weights import policy_weights

    started = time.perf_counter()
    kept.begin(version, None, compare, shared=False)
    for bucket in backend.weight_buckets(policy_weights(backend.model)):
        kept.add(bucket)
    kept.end(whole=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--torch_dtype", default="bfloat16")
    parser.add_argument("--learning_rate", type=float, nargs="+", default=[5e-7, 1e-6])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no_server", action="store_true")
    args = parser.parse_args()

    import torch

    from swift_r1.models.loading import load_model
    from swift_r1.models.weights import policy_weights
    from swift_r1.training.backends.local import LocalBackend
    from swift_r1.training.optimizer import OptimizerConfig

    with ExitStack() as cleanup:
        # Each way has a server of its own: what one sends is no base for the other.
        clients = (
            []
            if args.no_server
            else [cleanup.enter_context(server(args.model, args.torch_dtype)) for _ in "12"]
        )
        writers = [cleanup.enter_context(WeightWriter(client)) for client in clients]
        versions = [client.info().weight_version for client in clients]
        for rate in args.learning_rate:
            backend = LocalBackend(
                load_model(args.model, args.torch_dtype, False),
                OptimizerConfig(rate, 0.0, 0.9, 0.95, 1e-8, 1.0),
            )
            generator = torch.Generator().manual_seed(0)
            kept, version = WeightSnapshot(), max(versions, default=0) + 1
            keep(kept, backend, version, False)
            for writer in writers:
                writer.push(version, SnapshotReader(kept, version, copy=False), "http")
            rows = []
            for step in range(1, args.steps + 1):
                train_step(backend, rate, generator)
                version += 1
                prepare = keep(kept, backend, version, True)
                buckets = list(SnapshotReader(kept, version, copy=False))
                size = sum(one.size for one in buckets)
                sent = sum(min(len(one.change or b"") or size, one.size) for one in buckets)
                line = f"lr {rate:g} step {step}: {kept.changed / kept.total:.3%} changed, {sent / 1e6:.2f} of "
                line += f"{size / 1e6:.1f} MB ({sent / size:.2%}), prepare {prepare:.2f} s"
                row = [kept.changed / kept.total, sent, prepare]
                if writers:
                    before, started = writers[0].sent_bytes, time.perf_counter()
                    writers[0].push(version, SnapshotReader(kept, version, copy=False), "http")
                    changes = time.perf_counter() - started
                    assert writers[0].sent_bytes - before == sent
                    started = time.perf_counter()
                    writers[1].push(
                        version, backend.weight_buckets(policy_weights(backend.model)), "http"
                    )
                    everything = time.perf_counter() - started
                    row += [prepare + changes, everything]
                    line += f", push of changes {prepare + changes:.2f} s, of everything {everything:.2f} s"
                print(line, flush=True)
                rows.append(row)
            versions = [version] * len(clients)
            medians = [statistics.median(column) for column in zip(*rows, strict=True)]
            shown = (
                f"lr {rate:g}: median {medians[0]:.3%} changed, {medians[1] / 1e6:.2f} MB a step"
            )
            if writers:
                shown += f", {medians[3]:.2f} s against {medians[4]:.2f} s"
            print(shown, flush=True)


if __name__ == "__main__":
    main()
