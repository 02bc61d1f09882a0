"""Processes that train tiny models, one case after another: starting them takes longer than a case."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests import forks
from tests.forks import ForkedProcess

WORKER = Path(__file__).with_name("backend_worker.py")


class Jobs:
    """`backend_worker.py` on one rank, and on two; each started when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[int, list[ForkedProcess]] = {}
        self._done: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {}

    def run(self, ranks: int = 1, **case: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a case wrote, and its weights; each case is run once."""
        key = json.dumps([ranks, case], sort_keys=True, default=str)
        if key not in self._done:
            out = self._folder / f"case{len(self._done)}.json"
            workers = self._ranks.setdefault(ranks, []) or self._start(ranks)
            for worker in workers:
                _pipe(worker.stdin).write(json.dumps(case | {"out": str(out)}, default=str) + "\n")
                _pipe(worker.stdin).flush()
            for rank, worker in enumerate(workers):
                answer = _answer(worker)
                if answer != "ok":
                    self.close()
                    raise AssertionError(
                        f"rank {rank}: {json.loads(answer) if answer else self._log(ranks, rank)}"
                    )
            self._done[key] = (
                json.loads(out.read_text()),
                load_file(out.with_suffix(".safetensors")),
            )
        return self._done[key]

    def close(self) -> None:
        for worker in (worker for workers in self._ranks.values() for worker in workers):
            worker.kill()
            worker.wait(60)
        self._ranks = {}

    def _start(self, ranks: int) -> list[ForkedProcess]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(ranks):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
            }
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environ = {
                name: str(value)
                for name, value in {"DS_ACCELERATOR": "cpu", **place, **meeting}.items()
            }
            words = [str(WORKER), *(["distributed"] if ranks > 1 else [])]
            with (self._folder / f"{ranks}-{rank}.log").open("wb") as log:
                self._ranks[ranks].append(
                    forks.start(
                        words, environ=environ, stdin=forks.PIPE, stdout=forks.PIPE, stderr=log
                    )
                )
        for worker in self._ranks[ranks]:
            assert _answer(worker) == "ready", "a worker did not start"
        return self._ranks[ranks]

    def _log(self, ranks: int, rank: int) -> str:
        return (self._folder / f"{ranks}-{rank}.log").read_text()[-4000:]


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _answer(worker: ForkedProcess) -> str:
    """The worker's next answer, "" where it has ended; what libraries print is left out."""
    for line in _pipe(worker.stdout):
        if line.strip() in ("ok", "ready") or line.startswith('"'):
            return line.strip()
    return ""


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Shared by all tests."""
    made = Jobs(tmp_path_factory.mktemp("jobs"))
    yield made
    made.close()
