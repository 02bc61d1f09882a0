"""`python tests/sync/fanout_server.py FOLDER [KEY]`: the real server over an engine that only notes what it loads.

`FOLDER/url` says where it listens, also after a restart; `loaded` has a line a load: the version and the hash of the
files; `sizes` the bytes of each bucket that came. While there is a file `hold-load` a load waits, with `hold-buckets`
the buckets that come; with `corrupt` it passes on other bytes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from swift_r1.flags.server import RolloutArguments
from swift_r1.serving.engines.base import EngineInfo, EnginePrompt, Generated, PromptTokenizer
from swift_r1.serving.routes import create_app
from swift_r1.serving.service import Lifecycle
from swift_r1.sync import server as update_server
from swift_r1.sync.buckets import Hash
from swift_r1.wire import protocol as wire
from swift_r1.wire.protocol import SamplingParams

BUCKETS = 4
SHAPES = {f"w{number}": (2000,) for number in range(BUCKETS)}


def hash_of(files: Sequence[bytes]) -> str:
    digest = Hash()
    for one in files:
        digest.update(one)
    return digest.hexdigest()


class NotingEngine:
    dead = False
    scores_alone = False
    info = EngineInfo("noting", "0", 100, "", 1024, "float32")
    prompts = PromptTokenizer(None)  # asked for no text

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        return Generated((1, 2), (-0.5, -0.5), "length")

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        await gone(self.folder / "hold-load")
        with (self.folder / "loaded").open("a") as file:
            file.write(f"{version} {hash_of([path.read_bytes() for path in files])}\n")

    def shutdown(self) -> None: ...


async def gone(mark: Path) -> None:
    while mark.exists():
        await asyncio.sleep(0.01)


async def main(folder: Path, api_key: str | None) -> None:
    plain = update_server._file

    def as_told(path: Path) -> Iterator[bytes]:
        for piece in plain(path):
            yield piece[:-1] + bytes([piece[-1] ^ 1]) if (folder / "corrupt").exists() else piece

    update_server._file = as_told
    wire.RELAY_ANSWER_S = 0.5
    config = RolloutArguments(model="none", api_key=api_key)
    lifecycle = Lifecycle(config, lambda: (NotingEngine(folder), SHAPES))
    app = create_app(lifecycle, api_key)

    async def held(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/v1/weights/bucket":
            await gone(folder / "hold-buckets")
            with (folder / "sizes").open("ab") as file:
                file.write(dict(scope["headers"])[b"content-length"] + b"\n")
        await app(scope, receive, send)

    known = folder / "url"
    port = int(known.read_text().rpartition(":")[2]) if known.exists() else 0
    known.unlink(missing_ok=True)
    server = uvicorn.Server(uvicorn.Config(held, port=port, log_level="error", lifespan="off"))
    life, http = asyncio.create_task(lifecycle.run()), asyncio.create_task(server.serve())
    while not server.started or lifecycle.service is None:
        await asyncio.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    (folder / "url.new").write_text(f"http://{host}:{port}")
    (folder / "url.new").rename(known)
    await http
    life.cancel()
    lifecycle.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
