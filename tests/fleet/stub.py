"""`swift rollout` and `swift rlhf` for tests of the launcher, without a model: a server that is ready at once, and a
trainer that does what a file tells it. `python stub.py -P -m swift_r1 COMMAND FLAGS...`, in a folder of the test's own.

Each start leaves `<command>-<pid>.json` with its words and variables, and a child that ignores signals, as engines do.
A trainer ends with the code in `end-<node>` when that file is there, and "saves" with 130 or 143 after a signal: into
`saved-<node>`, how many of its servers answer then. With the file `ranks` it has a rank, which saves when the trainer
was killed, once the file `disk` is there. The file `refuse` has a server end with 2 and these words; `taken-<command>`
has the next one end with 4; with `late` servers are not ready; with `talk` a trainer says more than a pipe takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from swift_r1.runtime.processes import end_with_parent

VARIABLES = (
    "NODE_RANK",
    "NNODES",
    "NPROC_PER_NODE",
    "CUDA_VISIBLE_DEVICES",
    "SWIFT_API_KEY",
    "SOME",
)


def main(command: str, flags: list[str]) -> None:
    def value(name: str) -> str:
        return flags[flags.index(name) + 1]

    if command == "rollout" and Path("refuse").exists():
        print(Path("refuse").read_text())
        sys.exit(2)
    with contextlib.suppress(FileNotFoundError):
        Path(f"taken-{command}").unlink()
        sys.exit(4)
    if command == "rlhf":
        servers = Path(value("--vllm_server_file")) if "--vllm_server_file" in flags else None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _frame: saves(number, servers))
        if Path("ranks").exists():
            environ = os.environ | {"TORCHELASTIC_RUN_ID": "none", "PARENT": str(os.getpid())}
            subprocess.Popen(
                [sys.executable, __file__, "rank"], env=environ, start_new_session=True
            )
    ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", ignoring], start_new_session=True)
    about = {name: os.environ.get(name) for name in VARIABLES}
    about |= {
        "pid": os.getpid(),
        "child": child.pid,
        "words": flags,
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    part = Path(f".{command}-{os.getpid()}.part")
    part.write_text(json.dumps(about))
    part.rename(f"{command}-{os.getpid()}.json")
    print(f"{command} is there", flush=True)
    if command == "rlhf" and Path("talk").exists():
        print(
            1000
            * "a line of a hundred characters, or nearly so, of which a pipe that nobody reads does not take all\n"
        )
    if command == "rollout":
        HTTPServer((value("--host"), int(value("--port"))), Ready).serve_forever()
    end = Path(f"end-{os.environ.get('NODE_RANK', '0')}")
    deadline = time.monotonic() + 120
    while not end.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.exit(int(end.read_text()))


def saves(number: int, servers: Path | None) -> None:
    urls = servers.read_text().split() if servers is not None else []
    Path(f"saved-{os.environ.get('NODE_RANK', '0')}").write_text(str(sum(map(answers, urls))))
    print("saves", flush=True)
    sys.exit(128 + number)


def answers(url: str) -> bool:
    place = urlsplit(url)
    connection = HTTPConnection(place.hostname, place.port, timeout=10)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request(
            "GET", "/ready", headers={"Authorization": f"Bearer {os.environ['SWIFT_API_KEY']}"}
        )
        return connection.getresponse().status == 200
    return False


def rank() -> None:
    """Saves as the kernel tells it that its launcher was killed."""
    told = []
    signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    end_with_parent(signal.SIGTERM)
    while not told and os.getppid() == int(os.environ["PARENT"]):
        time.sleep(0.05)
    node = os.environ.get("NODE_RANK", "0")
    Path(f"rank-saves-{node}").touch()
    while not Path("disk").exists():
        time.sleep(0.05)
    Path(f"rank-saved-{node}").touch()


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {os.environ['SWIFT_API_KEY']}"
        self.send_response((503 if Path("late").exists() else 200) if known else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        sys.exit(rank())
    assert sys.argv[1:4] == ["-P", "-m", "swift_r1"], sys.argv
    main(sys.argv[4], sys.argv[5:])
