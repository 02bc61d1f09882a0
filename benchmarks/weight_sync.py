"""Seconds from the optimizer step's end to a server that serves the new weights, by way of transport.

    python benchmarks/weight_sync.py --model models/smollm2-135m --transport shm http --repeats 7

Starts a real `swift rollout` (vLLM), holds the model as the trainer does and pushes it again and again. The commit is
the server's part after the last bucket: waiting for generations (there are none here) and the engine's own reload.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from swift_r1.sync.writer import WeightWriter
from swift_r1.wire.client import RolloutClient


@contextmanager
def server(
    model: str, dtype: str, *more: str, output: int | None = subprocess.DEVNULL
) -> Iterator[RolloutClient]:
    """Starts `swift rollout`, and ends it. SystemExit where it ends by itself before it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        sys.executable,
        "-m",
        "swift_r1",
        "rollout",
        "--model",
        model,
        "--port",
        str(port),
        "--torch_dtype",
        dtype,
    ]
    process = subprocess.Popen(
        [*words, *more], stdout=output, stderr=output, start_new_session=True
    )

    def going_on(line: str) -> None:
        print(line, file=sys.stderr)
        if process.poll() is not None:
            raise SystemExit(f"swift rollout ended with {process.returncode}")

    try:
        with RolloutClient(f"http://127.0.0.1:{port}") as client:
            client.wait_until_ready(300, report=going_on)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--torch_dtype", default="bfloat16")
    parser.add_argument("--transport", nargs="+", default=["shm", "http"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    from swift_r1.models.loading import load_model
    from swift_r1.models.weights import policy_weights
    from swift_r1.training.backends.local import LocalBackend
    from swift_r1.training.optimizer import OptimizerConfig

    model = load_model(args.model, args.torch_dtype, False)
    backend = LocalBackend(model, OptimizerConfig(1e-6, 0.0, 0.9, 0.99, 1e-8, 1.0))
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    print(f"{args.model}, {args.torch_dtype}: {size / 1e6:.0f} MB")
    with server(args.model, args.torch_dtype) as client, WeightWriter(client) as writer:
        version = client.info().weight_version
        for transport in args.transport:
            whole, commits = [], []
            for _ in range(args.repeats + 1):
                version += 1
                started = time.perf_counter()
                status = writer.push(
                    version, backend.weight_buckets(policy_weights(model)), transport
                )
                whole.append(time.perf_counter() - started)
                commits.append(status.seconds)
            # The first push finds nothing warm.
            shown = ", ".join(f"{seconds:.2f}" for seconds in whole[1:])
            print(
                f"{transport}: median {statistics.median(whole[1:]):.2f} s (of it the commit "
                f"{statistics.median(commits[1:]):.2f} s), best {min(whole[1:]):.2f} s, first {whole[0]:.2f} s: {shown}"
            )


if __name__ == "__main__":
    main()
