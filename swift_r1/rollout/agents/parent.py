"""`python -m swift_r1.rollout.agents.parent FD`: what episodes are forked from, so that plugins are imported once.
Linux.

It speaks JSON lines over the socket FD. It is told what to run, and answers `{"ready": true}` or `{"fault": text}`:

    {"plugins": [...], "agent": name | null, "command": [...] | null, "memory": GiB, "kept": [variables],
     "env_args": {...} | null}

Then it is a fork server (`workers/fork_server.py`), whose `ended` has `"result": text | null, "raised": text | null,
"given_up": [keys of calls]` too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import secrets
import signal
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

from swift_r1.errors import UsageError, a_kind, describe
from swift_r1.wire.sessions import EQUAL_CALLS, GIVEN_UP
from swift_r1.workers.confine import MEMORY_EXIT, ONE_THREAD, confine
from swift_r1.workers.fork_server import KEPT_BYTES, READ_BYTES, ForkServer, take_more_files

_KEY = "idempotency-key"
_TOLD = 100  # so many of the calls that were given up are named to the gateway with the next one
MAX_RETRIES = 5  # of a call, by the client that classes get


@dataclass(frozen=True)
class Order:
    """What all episodes run: a registered class, or a command."""

    plugins: Sequence[str]
    agent: str | None
    command: Sequence[str] | None
    memory: float
    kept: Sequence[str]
    env_args: Mapping[str, Any] | None = None  # of the environment that `agent` names


def mark_of(parent: int) -> str:
    """Returns what everything below this parent has in its environment."""
    return f"agents:{parent}"


def _run_program(order: Order, row: Mapping[str, Any], out: int) -> int:
    """Runs an episode in its own process."""
    if order.command is None:
        return _play(str(order.agent), row, out)
    program = order.command[0]
    try:
        os.execvp(program, list(order.command))
    except OSError as error:  # the program itself is there: `check_inputs` has looked
        why = f"{error.strerror}; if it is a script, its first line (#!) must name a program that is there"
        os.write(2, f"{program} cannot be run: {why}\n".encode())
    return 126


def _outcome(order: Order, code: int, result: bytes) -> dict[str, Any]:
    """Returns what an episode wrote to its pipe for results, nothing for a command."""
    if not result:
        ended_early = code == 0 and order.command is None
        return {"raised": "its process ended before run returned"} if ended_early else {}
    try:
        return dict(json.loads(result))
    except ValueError:  # its process was killed meanwhile, or only the end was kept
        return {"raised": f"what run returned is longer than {KEPT_BYTES['result'] >> 20} MiB"}


def _play(name: str, row: Mapping[str, Any], out: int) -> int:
    """Runs a registered class, and writes what it returned or raised to the descriptor `out`."""
    sys.stdin = open(0)  # noqa: SIM115  open to the end
    sys.stdout = open(1, "w", buffering=1)  # noqa: SIM115  open to the end
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115  open to the end
    given_up: list[str] = []
    try:
        said = {"result": json.dumps(asyncio.run(_run(name, row, given_up)), default=_plain)}
    except MemoryError:
        os._exit(MEMORY_EXIT)
    except BaseException as error:  # noqa: BLE001  a user's agent may raise anything, SystemExit too
        said = {"raised": describe(error)}
    for text in (sys.stdout, sys.stderr):
        text.flush()
    data = json.dumps({**said, "given_up": given_up}).encode()
    while data:
        data = data[os.write(out, data) :]
    return 0


async def _run(name: str, row: Mapping[str, Any], given_up: list[str]) -> Any:
    """Plays the episode; `given_up` gets the keys of calls whose answers it has not read."""
    from openai import APIConnectionError, AsyncOpenAI, DefaultAsyncHttpxClient

    from swift_r1.plugins.agents import agents

    class Http(DefaultAsyncHttpxClient):
        """Reads streams to their end too, which come as one chunk: a call is read or it is not."""

        async def send(self, *request: Any, **options: Any) -> Any:
            response = await super().send(*request, **options)
            await response.aread()
            return response

    class Client(AsyncOpenAI):
        """Says of equal calls which one it is, since they may arrive in another order than that of the agent; and which
        calls were given up, since their answers may be on the way."""

        made: ClassVar[Counter[str]] = Counter()  # by what they say; a process is one episode
        under_way: ClassVar[set[asyncio.Future[None]]] = set()

        async def post(
            self, path: str, *, body: Any = None, options: Any = None, **more: Any
        ) -> Any:
            options = dict(options or {})
            said = f"{path} {body}"
            headers = dict(options.get("headers") or {})
            key = next(
                (value for name, value in headers.items() if name.lower() == _KEY),
                secrets.token_hex(8),
            )
            own = {
                _KEY: key,
                EQUAL_CALLS: str(self.made[said]),
                GIVEN_UP: ",".join(given_up[-_TOLD:]),
            }
            options["headers"] = own | headers
            self.made[said] += 1
            over = asyncio.get_running_loop().create_future()
            self.under_way.add(over)
            try:
                return await super().post(path, body=body, options=options, **more)
            except (asyncio.CancelledError, GeneratorExit, APIConnectionError):
                given_up.append(key)
                raise
            finally:
                self.under_way.remove(over)
                over.set_result(None)

    # The episode's own deadline ends what hangs: a wait for the model may be long.
    http = Http(verify=_tls(), timeout=None, trust_env=False)
    async with Client(max_retries=MAX_RETRIES, timeout=None, http_client=http) as client:
        try:
            return await agents[name]().run(client, dict(row))
        finally:
            if client.under_way:  # nobody has given them up: they count, however long they take
                await asyncio.wait(client.under_way)


@cache
def _tls() -> ssl.SSLContext:
    """Takes 20 ms, mostly to read certificates."""
    import httpx

    return httpx.create_ssl_context()


async def _rehearse() -> None:
    """Makes a call that is answered here: OpenAI's client imports and builds much of itself in its first one, which
    episodes would each do again (0.09 instead of 0.02 s of CPU time, with its certificates)."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    message = {"role": "assistant", "content": "-"}
    answer = {"id": "-", "object": "chat.completion", "created": 0, "model": "-"}
    body = json.dumps(
        answer | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
    ).encode()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = (
            f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        http = DefaultAsyncHttpxClient(verify=_tls(), trust_env=False)
        async with AsyncOpenAI(base_url=url, api_key="-", http_client=http) as client:
            await client.chat.completions.create(
                model="-", messages=[{"role": "user", "content": "-"}]
            )


def _plain(value: Any) -> Any:
    """Returns numbers of numpy and torch as such. Raises TypeError for what is no JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"run returned {a_kind(value)}, which is not JSON")


def main(descriptor: int) -> int:
    # of the trainer's group: it decides when its episodes end
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    received = b""
    while not received.endswith(b"\n"):
        data = control.recv(READ_BYTES)
        if not data:
            return 0
        received += data
    order = Order(**json.loads(received))
    os.environ.update(ONE_THREAD)
    confine(mark_of(os.getpid()), order.kept)
    for name in ("NO_PROXY", "no_proxy"):  # the gateway is here, whatever proxy --reward_env keeps
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
    try:
        _load(order)
    except UsageError as error:
        control.sendall(json.dumps({"fault": str(error)}).encode() + b"\n")
        return 2
    gc.collect()
    gc.freeze()  # pages that are not written stay shared with the episodes
    run = partial(_run_program, order)
    server = ForkServer(control, order.memory, take_more_files(), run, partial(_outcome, order))
    control.sendall(b'{"ready": true}\n')
    try:
        # the trainer is gone, and has not read everything
        with contextlib.suppress(ConnectionError):
            server.serve()
    finally:
        server.close()
    return 0


def _load(order: Order) -> None:
    """Raises UsageError."""
    if order.agent is None:
        return
    from swift_r1.plugins import load_plugins
    from swift_r1.plugins.agents import agents

    load_plugins(order.plugins)
    if order.env_args is not None:
        from swift_r1.plugins.environments.base import adapter, seed_generators

        agents[order.agent] = environment = adapter(order.agent, order.env_args)
        seed_generators("rows")  # as in the process that has read them
        try:
            environment.prepare()
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"--env {order.agent} failed: {describe(error)}") from error
    if order.agent not in agents:
        raise UsageError(
            f"--agent {order.agent}: the plugins do not register it in another process"
        )
    asyncio.run(_rehearse())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
