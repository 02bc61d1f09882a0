"""`python -m swift_r1.rollout.agents.parent FD`: what episodes are forked from, so that plugins are imported once.
Linux.

It speaks JSON lines over the socket FD. It is told what to run, and answers `{"ready": true}` or `{"fault": text}`:

    {"plugins": [...], "agent": name | null, "command": [...] | null, "memory": GiB, "kept": [variables],
     "env_args": {...} | null}

Then `{"begin": number, "environ": {...}, "row": {...}}` begins an episode and `{"end": number}` kills it. Either way
`{"ended": number, "code": n, "result": text | null, "raised": text | null, "given_up": [keys of calls], "stdout": text,
"stderr": text}` comes once the process and whatever it has started are gone. When the socket closes, all of them are
killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import secrets
import selectors
import signal
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NoReturn

from swift_r1.errors import UsageError, a_kind, describe
from swift_r1.runtime.processes import adopt_orphans, end_with_parent
from swift_r1.wire.sessions import EQUAL_CALLS, GIVEN_UP
from swift_r1.workers.confine import MEMORY_EXIT, ONE_THREAD, confine, limit_memory
from swift_r1.workers.killing import end_children, end_group, end_whole

_KEPT = {"stdout": 1 << 20, "stderr": 8 << 10, "result": 16 << 20}  # bytes at the end of what an episode says
_READ = 1 << 16
_MOST_FILES = 1 << 16
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


@dataclass(eq=False)
class _Episode:
    number: int
    pid: int
    pidfd: int
    pipes: dict[int, str]  # by descriptor, what comes from it
    said: dict[str, bytearray] = field(default_factory=lambda: {name: bytearray() for name in _KEPT})

    def hear(self, descriptor: int) -> bool:
        """Takes what is there; False at the end of the pipe."""
        name = self.pipes[descriptor]
        try:
            data = os.read(descriptor, _READ)
        except BlockingIOError:
            return False
        kept = self.said[name]
        kept += data
        del kept[: -_KEPT[name]]
        return bool(data)

    def text(self, name: str) -> str:
        return self.said[name].decode(errors="replace")


class Parent:
    """Starts episodes, each with the limits of open `files`, reads what they write, and tells when they have ended."""

    def __init__(self, control: socket.socket, order: Order, files: tuple[int, int]) -> None:
        self._control = control
        self._order = order
        self._files = files
        self._episodes: dict[int, _Episode] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._heard = b""

    def serve(self) -> None:
        """Until the other end of the socket is gone."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    data = self._control.recv(_READ)
                    if not data:
                        return
                    *lines, self._heard = (self._heard + data).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line))
                elif key.data.pidfd == key.fd:
                    self._end(key.data)
                elif key.fd in key.data.pipes and not key.data.hear(key.fd):
                    self._close(key.data, key.fd)

    def close(self) -> None:
        end_whole([one.pid for one in self._episodes.values()])
        end_children()

    def _take(self, message: Mapping[str, Any]) -> None:
        if "begin" in message:
            try:
                self._begin(message["begin"], message["environ"], message["row"])
            except OSError as error:  # no more processes, or files
                self._tell({"ended": message["begin"], "code": 1, "raised": f"it cannot be started: {error}"})
        elif (episode := self._episodes.get(message["end"])) is not None:
            end_whole([episode.pid])

    def _begin(self, number: int, environ: Mapping[str, str], row: Mapping[str, Any]) -> None:
        """Raises OSError where there are no more files or processes."""
        pipes: dict[str, tuple[int, int]] = {}
        with contextlib.ExitStack() as undo:
            for name in _KEPT:
                pipes[name] = os.pipe()
                for end in pipes[name]:
                    undo.callback(os.close, end)
            stdin = os.memfd_create("row")
            undo.callback(os.close, stdin)
            os.write(stdin, json.dumps(row).encode() + b"\n")
            os.lseek(stdin, 0, os.SEEK_SET)
            pid = os.fork()
            if pid == 0:
                try:
                    self._become(stdin, {name: write for name, (_, write) in pipes.items()}, environ, row)
                except BaseException as error:  # noqa: BLE001  nothing may run on as if it were the parent
                    os.write(2, f"{describe(error)}\n".encode())
                os._exit(1)
            undo.callback(os.waitpid, pid, 0)
            undo.callback(os.kill, pid, signal.SIGKILL)
            pidfd = os.pidfd_open(pid)
            undo.pop_all()
        os.close(stdin)
        with contextlib.suppress(OSError):  # the child does the same: whoever comes first
            os.setpgid(pid, pid)
        episode = _Episode(number, pid, pidfd, {read: name for name, (read, _) in pipes.items()})
        self._episodes[number] = episode
        self._selector.register(episode.pidfd, selectors.EVENT_READ, episode)
        for read, write in pipes.values():
            os.close(write)
            os.set_blocking(read, False)
            self._selector.register(read, selectors.EVENT_READ, episode)

    def _end(self, episode: _Episode) -> None:
        """The process is over: what it has left behind ends too."""
        self._selector.unregister(episode.pidfd)
        _, status = os.waitpid(episode.pid, 0)
        os.close(episode.pidfd)
        del self._episodes[episode.number]
        end_group(episode.pid)
        end_children([one.pid for one in self._episodes.values()])
        for descriptor in list(episode.pipes):
            while episode.hear(descriptor):
                pass
            self._close(episode, descriptor)
        code = os.waitstatus_to_exitcode(status)
        result = episode.said["result"]
        if code == 0 and not result and self._order.command is None:
            returned: dict[str, Any] = {"raised": "its process ended before run returned"}
        else:
            returned = _returned(result)
        said = {name: episode.text(name) for name in ("stdout", "stderr")}
        answer = {"ended": episode.number, "code": code, **said, **returned}
        self._tell(answer)

    def _tell(self, answer: Mapping[str, Any]) -> None:
        self._control.sendall(json.dumps(answer).encode() + b"\n")

    def _close(self, episode: _Episode, descriptor: int) -> None:
        if episode.pipes.pop(descriptor, None) is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _become(
        self, stdin: int, pipes: Mapping[str, int], environ: Mapping[str, str], row: Mapping[str, Any]
    ) -> NoReturn:
        """In the child: the episode's program."""
        end_with_parent(signal.SIGKILL)
        os.setpgid(0, 0)
        adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        self._control.close()
        os.dup2(stdin, 0)
        os.dup2(pipes["stdout"], 1)
        os.dup2(pipes["stderr"], 2)
        os.environ.update(environ)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out the trainer is not what is killed
        limit_memory(self._order.memory)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._files)
        if self._order.command is not None:
            program = self._order.command[0]
            try:
                os.execvp(program, list(self._order.command))
            except OSError as error:  # the program itself is there: `check_inputs` has looked
                why = f"{error.strerror}; if it is a script, its first line (#!) must name a program that is there"
                os.write(2, f"{program} cannot be run: {why}\n".encode())
                os._exit(126)
        os._exit(_play(str(self._order.agent), row, pipes["result"]))


def mark_of(parent: int) -> str:
    """Returns what everything below this parent has in its environment."""
    return f"agents:{parent}"


def _returned(said: bytearray) -> dict[str, Any]:
    """Returns what an episode wrote to its pipe for results, nothing for a command."""
    if not said:
        return {}
    try:
        return dict(json.loads(said))
    except ValueError:  # its process was killed meanwhile, or only the end was kept
        return {"raised": f"what run returned is longer than {_KEPT['result'] >> 20} MiB"}


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

        async def post(self, path: str, *, body: Any = None, options: Any = None, **more: Any) -> Any:
            options = dict(options or {})
            said = f"{path} {body}"
            headers = dict(options.get("headers") or {})
            key = next((value for name, value in headers.items() if name.lower() == _KEY), secrets.token_hex(8))
            own = {_KEY: key, EQUAL_CALLS: str(self.made[said]), GIVEN_UP: ",".join(given_up[-_TOLD:])}
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
    http = Http(verify=_tls(), timeout=None)
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
    """A call that is answered here: OpenAI's client imports and builds much of itself in its first one, which episodes
    would each do again (0.09 instead of 0.02 s of CPU time, with its certificates)."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    message = {"role": "assistant", "content": "-"}
    answer = {"id": "-", "object": "chat.completion", "created": 0, "model": "-"}
    body = json.dumps(answer | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        http = DefaultAsyncHttpxClient(verify=_tls(), trust_env=False)
        async with AsyncOpenAI(base_url=url, api_key="-", http_client=http) as client:
            await client.chat.completions.create(model="-", messages=[{"role": "user", "content": "-"}])


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"run returned {a_kind(value)}, which is no JSON")


def main(descriptor: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # of the trainer's group: it decides when its episodes end
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    heard = b""
    while not heard.endswith(b"\n"):
        data = control.recv(_READ)
        if not data:
            return 0
        heard += data
    order = Order(**json.loads(heard))
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
    # Each episode has up to four files here; their own limit stays as it was, usually 1,024.
    files = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MOST_FILES)), hard))
    parent = Parent(control, order, files)
    control.sendall(b'{"ready": true}\n')
    try:
        with contextlib.suppress(ConnectionError):  # the trainer is gone, and has not read everything
            parent.serve()
    finally:
        parent.close()
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
        raise UsageError(f"--agent {order.agent}: the plugins do not register it in another process")
    asyncio.run(_rehearse())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
