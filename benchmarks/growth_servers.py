"""What more rollout servers cost the trainer: messages, bytes and CPU time of a round and of a push of the weights.

    python benchmarks/growth_servers.py
    python benchmarks/growth_servers.py --sizes 1 2 4 8 --transport http --plot true

The servers are real ones on this host, all in one other process, over an engine that answers without a model: so the
figures are the trainer's own. A round is 64 requests of 16 completions of 64 tokens. `balance` is the busiest server's
share of the completions times the number of servers: 1 is even. `gathers` is how often a push took the weights from the
model.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROUND, GROUP, TOKENS = 64, 16, 64
BUCKETS, BUCKET_BYTES = 8, 8 << 20
EXPECTED = {f"w{number}": (BUCKET_BYTES // 4,) for number in range(BUCKETS)}
WAIT_S = 60
SERIES = {
    "round_cpu": "round, CPU ms",
    "round_messages": "messages a round",
    "push_cpu": "push, CPU ms",
    "push_messages": "messages a push",
    "sent": "MB a push",
    "gathers": "gathers",
    "balance": "balance",
}


class Engine:
    """Answers at once with the same tokens, and counts what it is asked."""

    dead = False
    scores_alone = False

    def __init__(self) -> None:
        from swift_r1.inference.engines.base import EngineInfo

        self.info = EngineInfo("scripted", "0", 100, "", 1024, "float32")
        self.completions = 0

    async def generate(self, prompt: Sequence[int], sampling: Any, seed: int | None) -> Any:
        from swift_r1.inference.engines.base import Generated

        self.completions += 1
        await asyncio.sleep(0.05)  # others come meanwhile, as at an engine that takes its time
        return Generated(tuple(range(TOKENS)), (-0.123456789,) * TOKENS, "length")

    async def load_weights(self, files: Sequence[Path], version: int) -> None: ...

    def shutdown(self) -> None: ...


def serve(count: int, pipe: Connection) -> None:
    """`count` servers; each question on the pipe is answered with messages and completions by server so far."""
    import uvicorn

    from swift_r1.arguments.server import RolloutArguments
    from swift_r1.inference.routes import create_app
    from swift_r1.inference.service import Lifecycle

    engines, messages, ports = [Engine() for _ in range(count)], Counter[int](), []

    async def run(number: int) -> None:
        lifecycle = Lifecycle(RolloutArguments(model="none"), lambda: (engines[number], EXPECTED))
        app = create_app(lifecycle, None)

        async def counting(scope: Any, receive: Any, send: Any) -> None:
            messages[number] += scope["type"] == "http"
            await app(scope, receive, send)

        server = uvicorn.Server(uvicorn.Config(counting, port=0, log_level="error", lifespan="off"))
        life = asyncio.create_task(lifecycle.run())
        http = asyncio.create_task(server.serve())
        while not server.started or lifecycle.service is None:
            await asyncio.sleep(0.01)
        ports.append(server.servers[0].sockets[0].getsockname()[1])
        await asyncio.gather(http, life)

    for number in range(count):
        threading.Thread(target=asyncio.run, args=(run(number),), daemon=True).start()
    deadline = time.monotonic() + WAIT_S
    while len(ports) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    pipe.send(ports)
    while pipe.recv():
        pipe.send((sum(messages.values()), [engine.completions for engine in engines]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--transport", choices=("http", "shm"), default="shm")
    parser.add_argument("--repeats", type=int, default=4, help="rounds and pushes; the first is a warm-up")
    parser.add_argument("--plot", choices=("true", "false"), default="false")
    args = parser.parse_args()
    from growth_plot import growth

    rows = []
    for count in args.sizes:
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=serve, args=(count, other), daemon=True)
        process.start()
        if not pipe.poll(WAIT_S):
            sys.exit(f"no server within {WAIT_S} s")
        rows.append({"servers": count} | measured(pipe.recv(), pipe, args.transport, args.repeats))
        pipe.send(False)
        process.kill()
        process.join()
    name = f"servers-{args.transport}"
    growth(name, "servers", rows, SERIES, y_label="of the trainer", plot=args.plot == "true")
    return 0


def measured(ports: Sequence[int], pipe: Connection, transport: str, repeats: int) -> dict[str, float]:
    import torch

    from swift_r1.sampling.pool.pool import ServerPool
    from swift_r1.sampling.pool.session import Expected, ServerSession
    from swift_r1.weights.writer import WeightWriter
    from swift_r1.wire.client import RolloutClient
    from swift_r1.wire.protocol import RolloutRequest, SamplingParams

    sessions = []
    for port in ports:
        writer = WeightWriter(RolloutClient(f"http://127.0.0.1:{port}"))
        writer.hold(WAIT_S)
        sessions.append(ServerSession(writer, Expected("none", "", 100, None, GROUP), WAIT_S, transport))
    pool, gathers = ServerPool(sessions, WAIT_S, transport), 0
    weights = {name: torch.zeros(shape) for name, shape in EXPECTED.items()}

    def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
        nonlocal gathers
        gathers += 1
        for name, tensor in weights.items():
            tensor += 1
            yield [(name, tensor)]

    def counted() -> tuple[int, list[int]]:
        pipe.send(True)
        return pipe.recv()

    found: list[dict[str, float]] = []
    for number in range(repeats):
        begun, (before, _) = time.process_time(), counted()
        pool.push(buckets())
        pushed, (after, asked) = time.process_time(), counted()
        row = {"push_cpu": 1000 * (pushed - begun), "push_messages": after - before}
        sampling, prompt = SamplingParams(max_tokens=TOKENS), tuple(range(1, 9))
        requests = [
            RolloutRequest(
                request_id=f"{number}/{one}",
                prompt_token_ids=prompt,
                n=GROUP,
                seeds=tuple(range(GROUP)),
                sampling=sampling,
            )
            for one in range(ROUND)
        ]
        begun, answers = time.process_time(), []
        pool.ask(requests, pool.served.current, answers.append)
        row["round_cpu"] = 1000 * (time.process_time() - begun)
        last, answered = counted()
        shares = [one - other for one, other in zip(answered, asked, strict=True)]
        assert len(answers) == ROUND and sum(shares) == ROUND * GROUP
        row |= {"round_messages": last - after, "balance": max(shares) * len(shares) / sum(shares)}
        row |= {"sent": pool.take_metrics()["rollout/bytes"] / 1e6, "gathers": gathers}
        gathers = 0
        found.append(row)
    pool.close()
    return {name: min(one[name] for one in found[1:]) for name in found[0]}


if __name__ == "__main__":
    sys.exit(main())
