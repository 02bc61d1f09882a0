"""What more rollout servers cost rank 0: messages, bytes, CPU time, memory, threads and sockets, of a round, of a push
of the weights, and of waiting.

    python benchmarks/growth_servers.py --sizes 1 2 4 8 --transport shm --servers real
    python benchmarks/growth_servers.py --sizes 8 32 128 512 1024
    python benchmarks/growth_servers.py --sizes 8 32 128 512 1024 --weight_fanout 0

The servers are on this host, all in one other process: real ones over an engine that answers without a model, or
(`--servers light`) those of `light_servers.py`, of which this machine can have 1,024. The figures are rank 0's own, in
a new process for each size. A round is `--requests` requests of 16 completions; waiting is what it costs
while each server has one request that takes 12 s. `balance` is the busiest server's share of the completions times the
number of servers: 1 is even.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GROUP = 16
BUCKETS = 8
WAIT_S = 60
WAITING_S = 12
SERIES = {
    "round_cpu": "round, CPU s",
    "round_messages": "messages a round",
    "wait_cpu": "waiting, CPU ms/s",
    "push_cpu": "push, CPU s",
    "push_s": "push, s",
    "push_messages": "messages a push",
    "sent": "MB a push",
    "balance": "balance",
}
MORE = {
    "hold_s": "start, s",
    "idle_cpu": "idle, CPU ms/s",
    "rss": "RSS, MB",
    "threads": "threads",
    "files": "files",
}


class Engine:
    """Answers with the same tokens, and counts what it is asked."""

    dead = False
    scores_alone = False

    def __init__(self, tokens: int = 64) -> None:
        from swift_r1.serving.engines.base import EngineInfo, PromptTokenizer

        self.prompts = PromptTokenizer(None)  # asked for no text
        self.tokens = tokens

        self.info = EngineInfo("scripted", "0", 100, "", 1024, "float32")
        self.completions = 0

    async def generate(self, prompt: Sequence[int], sampling: Any, seed: int | None) -> Any:
        from swift_r1.serving.engines.base import Generated

        self.completions += 1
        # others come meanwhile, as at an engine that takes its time
        await asyncio.sleep(prompt[0] / 10)
        return Generated(tuple(range(self.tokens)), (-0.123456789,) * self.tokens, "length")

    async def load_weights(self, files: Sequence[Path], version: int) -> None: ...

    def shutdown(self) -> None: ...


def serve(count: int, shapes: dict[str, tuple[int, ...]], tokens: int, pipe: Connection) -> None:
    """`count` servers; each question on the pipe is answered with messages, 0, and completions by server so far."""
    import uvicorn

    from swift_r1.flags.server import RolloutArguments
    from swift_r1.serving.routes import create_app
    from swift_r1.serving.service import Lifecycle

    engines, messages, ports = [Engine(tokens) for _ in range(count)], Counter[int](), []

    async def run(number: int) -> None:
        lifecycle = Lifecycle(RolloutArguments(model="none"), lambda: (engines[number], shapes))
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
        pipe.send((sum(messages.values()), 0, [engine.completions for engine in engines]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32, 128, 512, 1024])
    parser.add_argument("--servers", choices=("real", "light"), default="light")
    parser.add_argument("--transport", choices=("http", "shm"), default="http")
    parser.add_argument("--weight_fanout", type=int, default=2, help="0: all from rank 0")
    parser.add_argument(
        "--bucket_mb", type=float, default=0.5, help=f"of each of the {BUCKETS} buckets"
    )
    parser.add_argument("--requests", type=int, default=1024, help="of a round")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument(
        "--repeats", type=int, default=2, help="rounds and pushes; the first is a warm-up"
    )
    parser.add_argument("--plot", choices=("true", "false"), default="false")
    args = parser.parse_args()
    from growth_plot import growth
    from light_servers import serve as serve_light

    rows = []
    context = multiprocessing.get_context("spawn")
    shapes = {f"w{number}": (int(args.bucket_mb * 1e6) // 4,) for number in range(BUCKETS)}
    for count in args.sizes:
        pipe, other = context.Pipe()
        ours = (
            (serve, (count, shapes, args.tokens, other))
            if args.servers == "real"
            else (serve_light, (count, GROUP, args.tokens, other))
        )
        server = context.Process(target=ours[0], args=ours[1], daemon=True)
        server.start()
        if not pipe.poll(WAIT_S):
            sys.exit(f"no server within {WAIT_S} s")
        result, end = context.Pipe()
        trainer = context.Process(target=trains, args=(pipe.recv(), pipe, shapes, vars(args), end))
        trainer.start()
        end.close()
        rows.append({"servers": count} | result.recv())
        print(rows[-1], flush=True)
        trainer.join()
        server.kill()
        server.join()
    name = f"servers-{args.transport}"
    growth(name, "servers", rows, SERIES, y_label="of rank 0", plot=args.plot == "true")
    growth(name, "servers", rows, MORE, plot=False)
    return 0


def trains(
    ports: Sequence[int],
    pipe: Connection,
    shapes: dict[str, tuple[int, ...]],
    args: dict[str, Any],
    end: Connection,
) -> None:
    end.send(measured(ports, pipe, shapes, args))


class Peak:
    """The most memory (MB), threads and open files of this process since it began."""

    def __init__(self) -> None:
        self.threads = self.files = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.threads = max(self.threads, threading.active_count())
            self.files = max(self.files, len(os.listdir("/proc/self/fd")))

    def end(self) -> dict[str, float]:
        self._over.set()
        self._thread.join()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        return {"rss": peak, "threads": self.threads, "files": self.files}


def measured(
    ports: Sequence[int], pipe: Connection, shapes: dict[str, tuple[int, ...]], args: dict[str, Any]
) -> dict[str, float]:
    import torch

    from swift_r1.rollout.calls import OpenCalls
    from swift_r1.rollout.pool.pool import ServerPool
    from swift_r1.rollout.pool.session import Expected, ServerSession
    from swift_r1.sync.writer import WeightWriter
    from swift_r1.wire.client import RolloutClient
    from swift_r1.wire.protocol import RolloutRequest, SamplingParams

    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    import torch

    before_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    peak, began = Peak(), time.monotonic()
    sessions = []
    for port in ports:
        writer = WeightWriter(RolloutClient(f"http://127.0.0.1:{port}"))
        writer.hold(WAIT_S)
        sessions.append(
            ServerSession(writer, Expected("none", "", 100, None, GROUP), WAIT_S, args["transport"])
        )
    pool = ServerPool(sessions, WAIT_S, args["transport"], fanout=args["weight_fanout"])
    once = {"hold_s": time.monotonic() - began}

    def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for name, tensor in weights.items():
            tensor += 1
            yield [(name, tensor)]

    def counted() -> tuple[int, int, list[int]]:
        pipe.send(True)
        return pipe.recv()

    def ask(name: str, count: int, tenths: int, look: Callable[[], None] = lambda: None) -> None:
        sampling, answers = SamplingParams(max_tokens=args["tokens"]), []
        requests = [
            RolloutRequest(
                request_id=f"{name}/{one}",
                prompt_token_ids=(tenths, 1, 2, 3),
                n=GROUP,
                seeds=tuple(range(GROUP)),
                sampling=sampling,
            )
            for one in range(count)
        ]
        pool.ask(OpenCalls(answers.append, look, requests), pool.served.current)
        assert len(answers) == count

    found: list[dict[str, float]] = []
    for number in range(args["repeats"]):
        gc.collect()
        begun, began, (before, _, _) = time.process_time(), time.monotonic(), counted()
        pool.publish(buckets())
        row = {"push_cpu": time.process_time() - begun, "push_s": time.monotonic() - began}
        after, _, asked = counted()
        row |= {"push_messages": after - before, "sent": pool.take_metrics()["rollout/bytes"] / 1e6}
        begun, began = time.process_time(), time.monotonic()
        ask(str(number), args["requests"], 1)
        row |= {"round_cpu": time.process_time() - begun, "round_s": time.monotonic() - began}
        last, _, answered = counted()
        shares = [one - other for one, other in zip(answered, asked, strict=True)]
        row |= {"round_messages": last - after, "balance": max(shares) * len(shares) / sum(shares)}
        found.append(row)
    begun, began = time.process_time(), time.monotonic()
    time.sleep(WAITING_S)
    once["idle_cpu"] = 1000 * (time.process_time() - begun) / (time.monotonic() - began)
    looks: list[tuple[float, float]] = []
    ask(
        "waiting",
        len(ports),
        10 * WAITING_S,
        lambda: looks.append((time.monotonic(), time.process_time())),
    )
    since = looks[-1][0] - WAITING_S / 2  # all has been asked, and nothing is answered yet
    (begun, used), (ended, used_then) = next(one for one in looks if one[0] > since), looks[-1]
    once["wait_cpu"] = 1000 * (used_then - used) / (ended - begun)
    once |= peak.end()
    once["rss"] -= before_rss
    pool.close()
    return once | {name: min(one[name] for one in found[1:]) for name in found[0]}


if __name__ == "__main__":
    sys.exit(main())
