"""How long a push of the weights takes, and what rank 0 sends, directly and down trees, on a network of a given speed.

    sudo python benchmarks/fanout.py --servers 16 --mbit 200 --weight_fanout 0 4 2 1

Each server, and rank 0, is in a network namespace of its own (iproute2), joined by a bridge; each sends at most
`--mbit` megabits a second (`tc tbf`). The servers are real ones over an engine that answers without a model. The first
push of a row is a warm-up; the median of the others is shown, and its ratio to the first row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PORT = 8000
KEY = "of-this-benchmark"
WAIT_S = 90
BUCKETS = 16


def serve(address: str, bucket: int) -> None:
    import uvicorn
    from growth_servers import Engine

    from swift_r1.flags.server import RolloutArguments
    from swift_r1.serving.routes import create_app
    from swift_r1.serving.service import Lifecycle

    shapes = {f"w{number}": (bucket // 4,) for number in range(BUCKETS)}

    async def run() -> None:
        lifecycle = Lifecycle(
            RolloutArguments(model="none", api_key=KEY), lambda: (Engine(), shapes)
        )
        server = uvicorn.Server(
            uvicorn.Config(create_app(lifecycle, KEY), host=address, port=PORT, log_level="error")
        )
        await asyncio.gather(lifecycle.run(), server.serve())

    asyncio.run(run())


def train(addresses: list[str], bucket: int, fanouts: list[int], repeats: int) -> None:
    """In rank 0's namespace; prints a JSON line for each fan-out."""
    import torch

    from swift_r1.rollout.pool.pool import ServerPool
    from swift_r1.rollout.pool.session import Expected, ServerSession
    from swift_r1.sync.writer import WeightWriter
    from swift_r1.wire.client import RolloutClient

    writers = []
    for address in addresses:
        client = RolloutClient(f"http://{address}:{PORT}", KEY)
        client.wait_until_ready(WAIT_S)
        writers.append(WeightWriter(client))
        writers[-1].hold(WAIT_S)

    def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for number in range(BUCKETS):
            yield [(f"w{number}", torch.zeros(bucket // 4))]

    for fanout in fanouts:
        sessions = [
            ServerSession(one, Expected("none", "", 100, None), WAIT_S, "http") for one in writers
        ]
        pool, seconds = ServerPool(sessions, WAIT_S, "http", compare=False, fanout=fanout), []
        for _ in range(repeats):
            began = time.monotonic()
            pool.publish(buckets())
            seconds.append(time.monotonic() - began)
            sent = pool.take_metrics()["rollout/bytes"]
        print(
            json.dumps({"fanout": fanout, "seconds": statistics.median(seconds[1:]), "sent": sent}),
            flush=True,
        )
    for one in writers:
        one.close()


@contextmanager
def network(count: int, mbit: float) -> Iterator[list[tuple[str, str]]]:
    """Namespaces with their addresses."""
    prefix = f"fan{os.getpid()}"
    switch, made = (
        f"{prefix}-switch",
        [(f"{prefix}-{number}", f"10.88.0.{number + 1}") for number in range(count)],
    )
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for number, (name, address) in enumerate(made):
            ip("netns", "add", name)
            ip(
                "link",
                "add",
                "eth0",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                f"p{number}",
                "netns",
                switch,
            )
            ip("-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
            limit = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        yield made
    finally:
        for name in (switch, *(name for name, _ in made)):
            subprocess.run(
                ["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False
            )


def ip(*words: str) -> None:
    run("ip", *words)


def run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=20)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=16)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--mb", type=float, default=16.0, help=f"of weights, in {BUCKETS} buckets")
    parser.add_argument("--weight_fanout", type=int, nargs="+", default=[0, 4, 2, 1])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    bucket = int(args.mb * 1e6 / BUCKETS) // 4 * 4
    with ExitStack() as cleanup:
        (trainer, _), *servers = cleanup.enter_context(network(1 + args.servers, args.mbit))
        environ = os.environ | {
            "PYTHONPATH": f"{REPO}:{REPO / 'benchmarks'}",
            "OMP_NUM_THREADS": "1",
        }

        def within(name: str, call: str, **more: int) -> subprocess.Popen[str]:
            words = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-c",
                f"import fanout; fanout.{call}",
            ]
            process = subprocess.Popen(
                words, env=environ, text=True, stdout=subprocess.PIPE if more else None
            )
            cleanup.callback(process.wait, 20)
            cleanup.callback(process.kill)
            return process

        for name, address in servers:
            within(name, f"serve({address!r}, {bucket})")
        addresses = [address for _, address in servers]
        training = within(
            trainer, f"train({addresses}, {bucket}, {args.weight_fanout}, {args.repeats})", stdout=1
        )
        first = 0.0
        print(f"{args.servers} servers, {args.mb:g} MB, {args.mbit:g} Mbit/s")
        for line in training.stdout or ():
            row = json.loads(line)
            first = first or row["seconds"]
            ratio, sent = row["seconds"] / first, row["sent"] / 1e6
            print(
                f"fan-out {row['fanout']}: {row['seconds']:6.2f} s ({ratio:.2f}), {sent:6.1f} MB from rank 0",
                flush=True,
            )
        return training.wait(20)


if __name__ == "__main__":
    sys.exit(main())
