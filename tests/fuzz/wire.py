"""`python -m tests.fuzz.wire --seconds 3600`: a byte-level fuzzer of weight updates, against servers of its own.

Each episode is a valid update (whole, as changes, through shared memory, an adapter) with one to three faults in it,
sent over HTTP. After each one the server must serve, and hold what it held before, or exactly what it has accepted and
committed. Every tenth episode is an update without a fault, which must be taken. No answer may be a 5xx but a 503 with
the reason why not now; the process, its memory, its files and descriptors are watched. A failure is saved as a file
with all requests of its episode; `--only NUMBER` runs that one again on a fresh server.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swift_r1.wire import protocol as wire
from tests.fuzz import pushes
from tests.fuzz.held_server import NUMBERS
from tests.fuzz.mutations import mutate
from tests.fuzz.pushes import Base, Held, Request

REPO = Path(__file__).resolve().parents[2]
HANG_S = 60.0
CLOSES_S = 180.0  # what runs has 30 s to end, and the machine may be busy
KEY = "fuzz-key"
WARM_UP = 500  # episodes of a server, after which its memory is compared
MOST_GROWTH = 48 << 20
MOST_VERSION = 2**50  # after a higher one the server is started again: versions only rise
VALID_EVERY = 10


NOT_HTTP = b"Invalid HTTP request received."  # uvicorn's own answer


class Fault(Exception):
    """The server did what it must not."""


@dataclass
class Answer:
    """`status` is None where the server only closed the connection."""

    status: int | None
    body: bytes = b""

    def json(self) -> dict[str, Any]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found


@dataclass
class State:
    """What the server must hold."""

    version: int = 0
    held: Held = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    base: Base | None = None  # that it may take changes to


class Server:
    """A process of its own, of which memory and descriptors are watched."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.shapes = pushes.LARGE if kind == "large" else pushes.SMALL
        config: dict[str, Any] = {"api_key": KEY} if kind != "large" else {}
        if kind == "adapters":
            config |= {"vllm_enable_lora": True, "vllm_max_lora_rank": 8}
        self.key = config.get("api_key")
        self.log = folder / f"server-{kind}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.fuzz.held_server",
                    json.dumps(self.shapes),
                    json.dumps(config),
                ],
                cwd=REPO,
                env=os.environ | {"PYTHONPATH": str(REPO), "MALLOC_ARENA_MAX": "2"},
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.about = psutil.Process(self.process.pid)
        self.state, self.episodes, self.folder = State(), 0, None
        self.overwritten = False  # a file of the base, by a file of ours
        self.warm: tuple[int, int] | None = None
        self.most = 0
        deadline = time.monotonic() + 120
        while self.ask("GET", "/ready").status != 200:
            if time.monotonic() > deadline:
                raise Fault("it did not become ready")
            time.sleep(0.1)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(CLOSES_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise Fault(f"it did not end within {CLOSES_S:g} s") from None

    def ask(self, method: str, path: str, body: Any = None, lease: str | None = None) -> Answer:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        if lease is not None:
            headers[wire.LEASE_HEADER] = lease
        content = None if body is None else json.dumps(body).encode()
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            return Answer(response.status, response.read())
        finally:
            connection.close()

    def held(self) -> tuple[float, ...]:
        answer = self.ask("POST", "/v1/score", {"sequences": [list(range(NUMBERS + 1))]})
        if answer.status != 200:
            raise Fault(f"it does not score: {answer}")
        return tuple(answer.json()["logprobs"][0])

    def check(self) -> None:
        """Between two episodes, when nobody holds the lease."""
        if (code := self.process.poll()) is not None:
            raise Fault(f"the server has ended with {code}: {self.log.read_text()[-3000:]}")
        info = self.ask("GET", "/info").json()
        if info["broken"] is not None or info["weight_version"] != self.state.version:
            raise Fault(f"version {self.state.version} was expected: {info}")
        for path in ("/ready", "/health", "/metrics"):
            if (answer := self.ask("GET", path)).status != 200:
                raise Fault(f"{path}: {answer}")
        if self.held() != pushes.expected_fingerprint(self.state.held, self.state.adapter):
            raise Fault("it holds other weights than were committed")

    def watch(self) -> str:
        rss, descriptors = self.about.memory_info().rss, self.about.num_fds()
        self.most = max(self.most, rss)
        if self.episodes == WARM_UP or self.warm is None:
            self.warm = rss, descriptors
        elif self.episodes > WARM_UP and (
            rss > self.warm[0] + MOST_GROWTH or descriptors > self.warm[1] + 30
        ):
            raise Fault(
                f"it has grown from {self.warm} to {rss, descriptors} bytes and descriptors"
            )
        files = 0 if self.folder is None else len(list(Path(self.folder).iterdir()))
        if files > 4 * len(self.shapes) + 8:
            raise Fault(f"there are {files} files in {self.folder}")
        size = f"{rss >> 20} MiB (warm {self.warm[0] >> 20})"
        return f"{self.kind}: {self.episodes} episodes, {size}, {descriptors} fds, {files} files"


class Episode:
    """One update with faults, request by request."""

    def __init__(self, server: Server, rng: random.Random, statuses: Counter[str]) -> None:
        self.server, self.rng, self.statuses = server, rng, statuses
        self.sent: list[tuple[Request, Any]] = []
        self.tokens: list[str] = []
        self.open: int | None = None  # the version that was begun
        self.adapter: Mapping[str, Any] | None = None
        self.staged: list[bytes] = []
        self.changes: str | None = None  # content hash of the base that this update may change

    def run(self, faulty: bool) -> None:
        requests, buckets = self._valid(faulty)
        if faulty:
            requests = mutate(self.rng, requests, pushes.buckets_of(self.rng, self.server.shapes))
        before = self.server.state.version
        for one in requests:
            self._do(one, strict=not faulty)
        self._end()
        self.server.check()
        if not faulty:
            if self.server.state.version <= before:
                raise Fault("an update without a fault was not taken")
            if self.staged != buckets:
                raise Fault("other buckets were staged than were sent")

    def _valid(self, faulty: bool) -> tuple[list[Request], list[bytes]]:
        server, rng = self.server, self.rng
        token = f"{rng.getrandbits(128):032x}"
        answer = server.ask(
            "POST", "/v1/weights/lease", {"owner": "fuzz", "ttl_seconds": 600.0, "token": token}
        )
        if answer.status != 200:
            raise Fault(f"the lease is not free: {answer}")
        self.tokens.append(token)
        version = server.state.version + rng.choice((1, 1, 2, 17))
        adapter = None
        if server.kind == "adapters":
            adapter = {
                "rank": pushes.RANK,
                "alpha": rng.choice((1.0, 8.0, 0.5)),
                "target_modules": list(pushes.TARGETS),
                "rslora": rng.random() < 0.5,
            }
        what, shapes = rng.random(), server.shapes if adapter is None else pushes.adapter_shapes()
        if (
            what < 0.4
            and self._holds_base(token, version)
            and not (server.overwritten and not faulty)
        ):
            assert server.state.base is not None
            return pushes.change_push_of(rng, version, server.state.base, adapter)
        buckets = pushes.buckets_of(rng, shapes)
        make = pushes.file_push_of if what > 0.8 and server.folder is not None else pushes.push_of
        return make(version, buckets, adapter), buckets

    def _holds_base(self, token: str, version: int) -> bool:
        """Whether the server still has the buckets of its version: one that was refused may have taken their place. It
        says so when an update begins; the one of the episode then begins again."""
        base = self.server.state.base
        answer = self.server.ask("POST", "/v1/weights/begin", {"version": version}, token)
        self.server.ask("POST", "/v1/weights/abort", {"version": version}, token)
        return base is not None and answer.json().get("base") == base.digest

    def _do(self, one: Request, strict: bool) -> None:
        server = self.server
        if one.method == "FILE":
            if server.folder is not None:
                pushes.put_file(Path(server.folder), one)
                server.overwritten = True
            self.sent.append((one, None))
            return
        if one.method != "RAW":
            if server.key is not None and one.header("Authorization") is None:
                one = one.with_header("Authorization", f"Bearer {server.key}")
            if one.header(wire.LEASE_HEADER) is None and one.path != "/v1/weights/lease":
                one = one.with_header(wire.LEASE_HEADER, self.tokens[0])
        answers = (
            self._twice(one) if one.how == "twice at once" else [(one, send(server.port, one))]
        )
        for request, answer in answers:
            self.sent.append((request, answer))
            self._judge(request, answer, strict)
        for request, answer in sorted(answers, key=lambda pair: pair[1].status != 200):
            self._note(request, answer)

    def _twice(self, one: Request) -> list[tuple[Request, Answer]]:
        """The same request and one with another body, at the same time."""
        rng = self.rng
        again = one
        if rng.random() < 0.5 and one.method == "PUT":
            body = one.body[:-2] + rng.randbytes(2)
            again = Request(one.method, one.path, one.headers, body).with_header(
                wire.DIGEST_HEADER, pushes.digest_of(body)
            )
        one = Request(one.method, one.path, one.headers, one.body)
        found: list[tuple[Request, Answer]] = []

        def go(request: Request) -> None:
            found.append((request, send(self.server.port, request)))

        threads = [threading.Thread(target=go, args=(request,)) for request in (one, again)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * HANG_S)
        if len(found) < 2:
            raise Fault("two requests at once were not both answered")
        return found

    def _judge(self, request: Request, answer: Answer, strict: bool) -> None:
        status = answer.status
        self.statuses[str(status)] += 1
        if strict and status != 200:
            raise Fault(f"{request.method} {request.path} of an update without a fault: {answer}")
        if status is None or status < 500:
            if (
                status is not None
                and status >= 400
                and answer.body != NOT_HTTP
                and request.method != "RAW"
            ):
                error = answer.json().get("error")
                if not isinstance(error, str) or not error:
                    raise Fault(f"no sentence says what is wrong: {answer}")
            return
        if status in (503, 502) and (request.path.endswith(("/commit", "/relay")) or status == 503):
            if not answer.json().get("error"):
                raise Fault(f"no sentence says why not now: {answer}")
            if status == 502 and not request.path.endswith("/relay"):
                raise Fault(f"{request.path}: {answer}")
            return
        raise Fault(f"{request.method} {request.path}: {answer}")

    def _note(self, request: Request, answer: Answer) -> None:
        """What an accepted request has changed."""
        path, server = request.path, self.server
        if request.method == "POST" and path == "/v1/weights/lease" and answer.status == 200:
            self.tokens.append(answer.json()["token"])
        if path == "/v1/weights/commit" and self.open is not None:
            self._committed(request, answer)
        if answer.status != 200:
            return
        if path == "/v1/weights/begin":
            body = json.loads(request.body)
            self.open, self.adapter, self.staged = int(body["version"]), body.get("adapter"), []
            said = answer.json()
            server.folder, self.changes = said["folder"], said["base"]
            base = server.state.base
            if self.changes is not None and (base is None or base.digest != self.changes):
                raise Fault(f"it offers a base that was not committed: {said}")
        elif path == "/v1/weights/bucket" and request.method == "PUT":
            # "1.0" is a whole number to the server
            index = int(float(request.header(wire.BUCKET_HEADER) or 0))
            self._staged(index, request.body, request.header(wire.BASE_HEADER))
        elif path == "/v1/weights/file":
            body = json.loads(request.body)
            name = f"incoming-{int(body['index']):06d}"
            written = [
                one.body for one, _ in self.sent if one.method == "FILE" and one.path == name
            ]
            matching = [
                one for one in (*written, *self.staged) if pushes.digest_of(one) == body["digest"]
            ]
            if not matching:
                raise Fault(f"a file was taken that has not the promised hash: {body}")
            self._staged(body["index"], matching[0], None)
        elif path == "/v1/weights/abort" or (
            path == "/v1/weights/lease" and request.method == "DELETE"
        ):
            self.open, self.staged = None, []

    def _staged(self, index: int, body: bytes, base: str | None) -> None:
        if base is not None:
            known = self.server.state.base
            if known is None or base != self.changes or known.digest != base:
                raise Fault("a change to something else was taken")
            body = pushes.changed(known.buckets[index], body)
        if index < len(self.staged):
            if self.staged[index] != body:
                raise Fault(f"bucket {index} was taken twice with different bytes")
            return
        if index != len(self.staged):
            raise Fault(f"bucket {index} was taken after {len(self.staged)}")
        self.staged.append(body)

    def _committed(self, request: Request, answer: Answer) -> None:
        server = self.server
        if answer.status is None:
            # Whether it came is not known: the server says.
            if server.ask("GET", "/info").json()["weight_version"] == server.state.version:
                return
        elif answer.status != 200:
            return
        elif answer.json()["weight_version"] == server.state.version:
            return  # said again
        new: Held = {}
        for one in self.staged:
            new |= pushes.tensors_of(one)
        expected = server.shapes if self.adapter is None else pushes.adapter_shapes()
        if self.adapter is None and {name: shape for name, (_, shape, _) in new.items()} != dict(
            expected
        ):
            raise Fault("it has committed what is not the whole model")
        base = Base(list(self.staged))
        assert self.open is not None
        server.state = State(self.open, new, self.adapter, base)
        server.overwritten = False
        self.open = None

    def _end(self) -> None:
        """Gives the lease back, whoever holds it."""
        deadline = time.monotonic() + HANG_S
        while True:
            for token in self.tokens:
                self.server.ask("DELETE", "/v1/weights/lease", lease=token)
            answer = self.server.ask("DELETE", "/v1/weights/lease", lease="0" * 32)
            if answer.status == 409 and b"no one holds" in answer.body:
                return
            if time.monotonic() > deadline:
                raise Fault(f"the lease cannot be given back: {answer}")
            time.sleep(0.05)


def send(port: int, request: Request) -> Answer:
    """Raises Fault where the server does not answer, and does not close the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        parts = as_bytes(request)
        try:
            for part in parts:
                connection.sendall(part)
            if request.method == "RAW" or request.how in (
                "cut",
                "half",
                "promises more",
                "bad chunks",
            ):
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was refused before it was all there; the answer may be there
        response = http.client.HTTPResponse(
            connection, method=request.method if request.method != "RAW" else "GET"
        )
        try:
            response.begin()
            return Answer(response.status, response.read())
        except TimeoutError as error:
            raise Fault(
                f"{request.method} {request.path} was not answered in {HANG_S:g} s"
            ) from error
        except (http.client.HTTPException, OSError, ValueError):
            return Answer(None)
        finally:
            response.close()


def as_bytes(request: Request) -> list[bytes]:
    if request.method == "RAW":
        return [request.body]
    body, how = request.body, request.how
    length: tuple[bytes, ...] = (b"Content-Length: %d" % len(body),)
    chunked = b"Transfer-Encoding: chunked"
    sent = [body]
    if how == "promises less":
        length = (b"Content-Length: %d" % max(len(body) - 5, 0),)
    elif how == "promises more":
        length = (b"Content-Length: %d" % (len(body) + 1000),)
    elif how == "two lengths":
        length = (*length, b"Content-Length: %d" % (len(body) + 1))
    elif how in ("chunked", "bad chunks", "both lengths"):
        length = (chunked, *length) if how == "both lengths" else (chunked,)
        middle = len(body) // 2
        sent = [b"%x\r\n%s\r\n" % (len(one), one) for one in (body[:middle], body[middle:]) if one]
        sent.append(b"zz\r\n\r\n" if how == "bad chunks" else b"0\r\n\r\n")
    elif how == "expect":
        length = (*length, b"Expect: 100-continue")
    elif how in ("cut", "half"):
        sent = [body[: len(body) // 2]]
    lines = [f"{request.method} {request.path} HTTP/1.1".encode(), b"Connection: close"]
    if request.header("Host") is None:
        lines.append(b"Host: 127.0.0.1")
    lines += [f"{name}: {value}".encode("utf-8", "replace") for name, value in request.headers]
    head = b"\r\n".join((*lines, *length)) + b"\r\n\r\n"
    return [head[: len(head) // 2]] if how == "half" else [head, *sent]


def save(
    folder: Path, seed: int, number: int, kind: str, fault: str, sent: list[tuple[Request, Any]]
) -> Path:
    """The episode that failed."""
    path = folder / f"fault-{kind}-{seed}-{number}.jsonl"
    with path.open("w") as file:
        file.write(
            json.dumps({"seed": seed, "episode": number, "server": kind, "fault": fault}) + "\n"
        )
        for request, answer in sent:
            about = {
                "method": request.method,
                "path": request.path,
                "headers": request.headers,
                "how": request.how,
            }
            shown = (
                None
                if answer is None
                else [answer.status, answer.body[:2000].decode("utf-8", "replace")]
            )
            more = {"body": base64.b64encode(request.body).decode(), "answer": shown}
            file.write(json.dumps(about | more) + "\n")
    return path


def fuzz(
    folder: Path,
    seconds: float,
    episodes: int | None = None,
    seed: int = 1,
    only: int | None = None,
    kinds: str = "small,adapters,large",
) -> Counter[str]:
    """Runs until the time is over, or so many episodes. Returns how often each status came. Raises Fault."""
    folder.mkdir(parents=True, exist_ok=True)
    servers: dict[str, Server] = {}
    statuses: Counter[str] = Counter()
    names = kinds.split(",")
    weights = [{"large": 1, "adapters": 3}.get(name, 6) for name in names]
    end, report, number = time.monotonic() + seconds, time.monotonic() + 60, only or 0
    first = number
    try:
        while time.monotonic() < end and (episodes is None or number < first + episodes):
            rng = random.Random(f"{seed}/{number}")
            kind = rng.choices(names, weights)[0]
            if kind in servers and servers[kind].state.version > MOST_VERSION:
                servers.pop(kind).close()
                statuses["server started again"] += 1
            if kind not in servers:
                servers[kind] = Server(kind, folder)
            server = servers[kind]
            episode = Episode(server, rng, statuses)
            try:
                episode.run(faulty=bool(number % VALID_EVERY))
                server.episodes += 1
                if number % 50 == 0 or server.episodes <= 1:
                    server.watch()
            except (Fault, OSError, ValueError, KeyError, AssertionError) as error:
                path = save(
                    folder, seed, number, kind, f"{type(error).__name__}: {error}", episode.sent
                )
                raise Fault(
                    f"episode {number} (--seed {seed}): {type(error).__name__}: {error}; saved: {path}"
                ) from error
            number += 1
            if time.monotonic() > report:
                report = time.monotonic() + 60
                print(
                    f"{number} episodes",
                    *(one.watch() for one in servers.values()),
                    dict(statuses),
                    sep="; ",
                    flush=True,
                )
        print(
            f"{number - first} episodes",
            *(one.watch() for one in servers.values()),
            dict(statuses),
            sep="; ",
            flush=True,
        )
    finally:
        for one in servers.values():
            one.close()
    for one in servers.values():
        if "Traceback" in (text := one.log.read_text()):
            raise Fault(f"a traceback in {one.log}: ...{text[text.index('Traceback') :][:3000]}")
    return statuses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="number of one episode")
    parser.add_argument("--kinds", default="small,adapters,large")
    parser.add_argument("--folder", type=Path, default=Path("output/fuzz"))
    args = parser.parse_args()
    episodes = 1 if args.only is not None else args.episodes
    try:
        fuzz(args.folder, args.seconds, episodes, args.seed, args.only, args.kinds)
    except Fault as fault:
        print(fault, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
