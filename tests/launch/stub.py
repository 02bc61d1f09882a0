"""`swift rollout` and `swift rlhf` for tests of the launcher, without a model: a server that is ready at once, and a
trainer that does what a file tells it. `python stub.py -m swift_r1 COMMAND FLAGS...`, in a folder of the test's own.

Each start leaves `<command>-<pid>.json` with its words and variables. A trainer ends with the code in `end-<node>`
when that file is there, with 130 or 143 after a signal, and has a child that ignores signals, as an engine may.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

VARIABLES = ("NODE_RANK", "NNODES", "NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES", "SWIFT_API_KEY", "SOME")


def main(command: str, flags: list[str]) -> None:
    def value(name: str) -> str:
        return flags[flags.index(name) + 1]

    if command == "rollout" and Path("refuse").exists():
        print(Path("refuse").read_text())
        sys.exit(2)
    ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", ignoring], start_new_session=True)
    about = {name: os.environ.get(name) for name in VARIABLES}
    about |= {"pid": os.getpid(), "child": child.pid, "words": flags, "cpus": sorted(os.sched_getaffinity(0))}
    part = Path(f".{command}-{os.getpid()}.part")
    part.write_text(json.dumps(about))
    part.rename(f"{command}-{os.getpid()}.json")
    print(f"{command} is there", flush=True)
    if command == "rollout":
        HTTPServer((value("--host"), int(value("--port"))), Ready).serve_forever()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    end = Path(f"end-{os.environ.get('NODE_RANK', '0')}")
    deadline = time.monotonic() + 120
    while not end.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.exit(int(end.read_text()))


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {os.environ['SWIFT_API_KEY']}"
        self.send_response(200 if known else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    assert sys.argv[1:3] == ["-m", "swift_r1"], sys.argv
    main(sys.argv[3], sys.argv[4:])
