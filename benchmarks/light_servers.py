"""Any number of rollout servers without a model, all in one process: what `growth_servers.py` has a trainer talk to.

They speak what a trainer asks in a run: health, info, lease, updates by HTTP, relays and rollouts. Nothing is checked,
weights are not kept, and of what one server is to pass on to another no byte moves.
"""

from __future__ import annotations

import asyncio
import json
import resource
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from swift_r1.wire import protocol as wire


class LightServer:
    """One server's state, and its answers."""

    def __init__(self, number: int, group: int, tokens: int) -> None:
        self.number, self.url, self.version, self.base, self.open_buckets = number, "", 0, None, 0
        self.completions, self.messages, self.received = 0, 0, 0
        self.committed = asyncio.Event()
        completion = wire.Completion(
            token_ids=tuple(range(tokens)),
            logprobs=(-0.123456789,) * tokens,
            finish_reason="length",
            weight_version=999_999_999,
        )
        one = completion.model_dump_json()
        self.group = group
        self.answer = (
            '{"outputs":[{"request_id":"%s","completions":[' + ",".join([one] * group) + "]}]}"
        )

    def info(self) -> wire.ServerInfo:
        return wire.ServerInfo(
            instance=f"{self.number:08x}",
            model="none",
            engine="light",
            engine_version="0",
            vocab_size=100,
            tokenizer_hash="",
            weight_version=self.version,
            broken=None,
            max_model_len=1024,
            max_n=1024,
            dtype="float32",
            max_lora_rank=None,
            own_base=True,
            nccl_workers=0,
        )

    def status(self, **more: Any) -> str:
        return wire.UpdateStatus(
            weight_version=self.version, pending_version=None, buckets=self.open_buckets, **more
        ).model_dump_json()

    async def answered(self, method: str, path: str, headers: dict[str, str], body: bytes) -> str:
        self.messages += 1
        if path == "/v1/rollouts":
            asked = json.loads(body)["requests"][0]
            self.completions += asked["n"]
            # The delay comes with the request: others come meanwhile, as at an engine that takes its time.
            await asyncio.sleep(asked["prompt_token_ids"][0] / 10)
            text = self.answer % asked["request_id"]
            return text.replace("999999999", str(self.version))
        if path == "/v1/weights/lease" and method == "POST":
            asked = json.loads(body)
            return wire.Lease(
                token=asked["token"], ttl_seconds=asked["ttl_seconds"]
            ).model_dump_json()
        if path == "/v1/weights/begin":
            self.committed.clear()
            self.open_buckets = 0
            return self.status(base=self.base)
        if path == "/v1/weights/bucket":
            self.received += len(body)
            self.open_buckets += 1
        if path == "/v1/weights/relay":
            with suppress(TimeoutError):
                await asyncio.wait_for(self.committed.wait(), wire.RELAY_ANSWER_S)
            return wire.RelayStatus(whole=self.committed.is_set()).model_dump_json()
        if path == "/v1/weights/commit":
            asked = json.loads(body)
            self.version, self.base = asked["version"], asked["content_hash"]
            self.committed.set()
        if path in ("/health", "/ready"):
            return '{"status":"ok"}'
        return self.info().model_dump_json() if path == "/info" else self.status()


async def _talk(
    server: LightServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            first, *lines = head.decode("latin-1").split("\r\n")
            method, path, _ = first.split(" ")
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            answer = (await server.answered(method, path, headers, body)).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % len(answer)
            )
            writer.write(answer)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client has hung up
    finally:
        writer.close()


def serve(count: int, group: int, tokens: int, pipe: Connection) -> None:
    """`count` servers on ports of their own. The pipe gets the ports, then, for each True that comes, messages and
    bytes of weights received by all, and completions by server."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def run() -> None:
        servers = [LightServer(number, group, tokens) for number in range(count)]
        ports = []
        for one in servers:
            listening = await asyncio.start_server(
                lambda reader, writer, one=one: _talk(one, reader, writer),
                "127.0.0.1",
                0,
                backlog=64,
                limit=1 << 24,
            )
            ports.append(listening.sockets[0].getsockname()[1])
            one.url = f"http://127.0.0.1:{ports[-1]}"
        pipe.send(ports)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv):
            messages = sum(one.messages for one in servers)
            pipe.send(
                (
                    messages,
                    sum(one.received for one in servers),
                    [one.completions for one in servers],
                )
            )

    asyncio.run(run())
