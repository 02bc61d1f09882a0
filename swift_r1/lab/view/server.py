"""The process behind the page: NiceGUI on uvicorn, on a socket that listens already.

`python -m swift_r1.lab.view.server RUN PORT PID` is the page beside a run (`swift rlhf --view true`), which ends
with the run's process PID.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import uvicorn

from swift_r1.errors import EXIT_OK, EXIT_PORT_TAKEN, EXIT_TERMINATED, PortTaken
from swift_r1.flags.parser import API_KEY_VARIABLE
from swift_r1.flags.rollout import url_of
from swift_r1.flags.server import LOOPBACK
from swift_r1.lab.view.access import Guard
from swift_r1.runtime.libraries import large_imports
from swift_r1.runtime.processes import end_with_parent, leave, say
from swift_r1.serving.server import bind

_PORTS = 20  # that are tried for the page beside a run
_NICE = 10  # the run comes first
_CLOSING_S = 1  # for connections to close after a signal; browsers reconnect for ever


def main(argv: Sequence[str]) -> NoReturn:
    """Serves the page beside a run. Another page may have the port: it takes the next free one."""
    run = argv[0]
    port = int(argv[1])
    trainer = int(argv[2])
    end_with_parent(signal.SIGTERM)
    if os.getppid() != trainer:
        leave(EXIT_TERMINATED)
    os.nice(_NICE)
    key = os.environ.get(API_KEY_VARIABLE) or None
    for number in range(port, port + _PORTS):
        try:
            listener = bind("127.0.0.1", number)
        except PortTaken:
            continue
        serve(listener, [run], key, how="it ends with the run")
    say(f"no page: ports {port} to {port + _PORTS - 1} are all taken", "view")
    leave(EXIT_PORT_TAKEN)


def serve(
    listener: socket.socket,
    runs: Sequence[str],
    api_key: str | None,
    how: str = "Ctrl-C ends it",
) -> NoReturn:
    """Answers on `listener` until a signal, which ends the process with 130 or 143. `runs` are the folders to look for
    runs in, as `find_runs` takes them; `how` it ends is said with the address."""
    asyncio.run(_serve(listener, _app(listener, runs, api_key), how, bool(api_key)))
    raise AssertionError("it ends by a signal")


def _app(listener: socket.socket, runs: Sequence[str], api_key: str | None) -> Guard:
    # What NiceGUI takes from the environment: a file or a Redis server to keep settings in, of which the page has none.
    os.environ.pop("NICEGUI_REDIS_URL", None)
    with large_imports():
        from fastapi import FastAPI
        from nicegui import app as pages_app
        from nicegui import ui

        from swift_r1.lab.view import pages
        from swift_r1.lab.view.shell import FAVICON, add_static, no_such_page, set_runs

        pages.load()
    set_runs(runs)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    add_static(app)
    pages_app.exception_handler(404)(no_such_page)
    ui.run_with(
        app,
        title="swift view",
        favicon=FAVICON,
        dark=None,
        tailwind=False,
        show_welcome_message=False,
        reconnect_timeout=10.0,
    )
    return Guard(app, listener.getsockname()[1], api_key, loopback=_is_loopback(listener))


async def _serve(
    listener: socket.socket,
    app: Guard,
    how: str,
    has_key: bool,
) -> None:
    class PageServer(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are ours: uvicorn would raise them again, as if nothing had handled them."""
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            address = _address(listener)
            key = "; the first time with ?key=... (--api_key) at its end" if has_key else ""
            print(f"swift view: {address}{key} ({how})", flush=True)

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_CLOSING_S,
        server_header=False,
    )
    server = PageServer(config)
    loop = asyncio.get_running_loop()
    code = EXIT_OK

    def stop(received: signal.Signals) -> None:
        nonlocal code
        if server.should_exit:
            leave(code)
        code = 128 + received
        server.should_exit = True

    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, stop, one)
    await server.serve([listener])
    atexit._run_exitfuncs()  # temporary folders
    leave(code)  # a query that still runs in a thread would be waited for


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return url_of(socket.gethostname() if host in ("0.0.0.0", "::") else host, port)


def _is_loopback(listener: socket.socket) -> bool:
    return listener.getsockname()[0] in LOOPBACK


if __name__ == "__main__":
    main(sys.argv[1:])
