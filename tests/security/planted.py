"""Secrets to be found again: wherever one of them is written, it is a leak."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import threading
import zlib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

VARIABLES = """
SWIFT_API_KEY SWIFT_HUB_TOKEN SWIFT_JUDGE_API_KEY SWIFT_REWARD_API_TOKEN JUDGE_OF_OURS_KEY HF_TOKEN
HUGGING_FACE_HUB_TOKEN MODELSCOPE_API_TOKEN WANDB_API_KEY SWANLAB_API_KEY VLLM_API_KEY OPENAI_API_KEY
MLFLOW_TRACKING_PASSWORD AWS_SECRET_ACCESS_KEY PGPASSWORD
"""
NAMES = tuple(VARIABLES.split())


EVERYTHING = (*NAMES, "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "DATABASE_URL")


def secret(name: str) -> str:
    """The value of a name; long enough to be found by itself, and without what a shell or an address would quote."""
    return f"planted-{zlib.crc32(name.encode()):08x}-{name.lower().replace('_', '-')}"


def environ() -> dict[str, str]:
    """All of `NAMES`, and proxies with passwords, which nobody listens behind."""
    proxies = {
        name: f"http://me:{secret(name)}@127.0.0.1:9"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "all_proxy")
    }
    database = {"DATABASE_URL": f"postgresql://me:{secret('DATABASE_URL')}@127.0.0.1/x"}
    return {name: secret(name) for name in NAMES} | proxies | database


@functools.cache
def forms(name: str) -> list[bytes]:
    """The text of a secret as it may stand in a file: itself, backwards, and in base64 behind 0, 1 or 2 others."""
    value = secret(name).encode()
    shifted = [base64.b64encode(b"x" * skip + value)[4 if skip else 0 : -4] for skip in range(3)]
    return [
        value,
        *shifted,
        value.hex().encode(),
        value[::-1],
        secret(name).encode("utf-16-le"),
    ]


def contents(path: Path) -> Iterator[bytes]:
    """A file's bytes, and what it holds compressed."""
    raw = path.read_bytes()
    yield raw
    if raw[:2] == b"\x1f\x8b":
        yield gzip.decompress(raw)
    if path.suffix == ".parquet":
        from pyarrow import parquet

        yield json.dumps(parquet.read_table(path).to_pylist(), default=str).encode()


def found_in(content: bytes, names: tuple[str, ...]) -> set[str]:
    return {name for name in names if any(form in content for form in forms(name))}


def leaks(folder: Path, said: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    """Which of the secrets are in which file below `folder`, its name included, or in what programs said."""
    found = [
        f"{one} in {name}" for name, text in said.items() for one in found_in(text.encode(), names)
    ]
    for path in sorted(folder.rglob("*")):
        found += [f"{one} in the name {path}" for one in found_in(str(path).encode(), names)]
        if path.is_file() and not path.is_symlink():
            found += [
                f"{one} in {path}" for content in contents(path) for one in found_in(content, names)
            ]
    return list(dict.fromkeys(found))


class CommandLines(threading.Thread):
    """Looks at the command lines of all processes until it is stopped."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(daemon=True)
        self.names, self.found, self.looked_at = names, set[str](), set[int]()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.1):
            for process in psutil.process_iter():
                try:
                    line = "\0".join(process.cmdline())
                except psutil.Error:
                    continue
                self.looked_at.add(process.pid)
                self.found |= {
                    f"{one} on the command line {line[:200]!r}"
                    for one in found_in(line.encode(), self.names)
                }

    def __enter__(self) -> CommandLines:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(30)


class Service(ThreadingHTTPServer):
    """A judge behind an OpenAI address, and a server of rewards, which both want a key; the first answer to each is a
    500 that shows it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.keys: dict[str, set[str | None]] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "judge"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first = self.path not in self.server.keys
        own = self.headers.get("Authorization")
        self.server.keys.setdefault(self.path, set()).add(own)
        if first:
            self._answer(500, {"error": {"message": f"I do not know {own}"}})
        elif self.path == "/rewards":
            self._answer(200, {"rewards": [0.5] * len(body["completions"])})
        else:
            message = {"role": "assistant", "content": "[[5]]"}
            self._answer(
                200,
                {
                    "choices": [{"message": message, "finish_reason": "stop"}],
                    "usage": {"total_tokens": 1},
                },
            )

    def _answer(self, status: int, content: Any) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None: ...
