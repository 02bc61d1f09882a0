"""`python -m swift_r1.inference.server ARGS.json`: the process behind `swift rollout`.

ARGS.json is `{"args": {...}}`, the resolved flags. Exit codes are those of `swift_r1.errors`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from swift_r1.errors import EXIT_OK, EXIT_USAGE, PortTaken, RunFailed, SwiftError, UsageError
from swift_r1.inference.config import ServerConfig
from swift_r1.runtime.processes import end_with_parent, leave, stop_at_once

_SERVER = "SWIFT_R1_SERVER"  # its process id, for its engine's processes

if __name__ == "__mp_main__":
    # A process of vLLM's, which imports this module before all else: none outlives the one that started it.
    end_with_parent(signal.SIGKILL)
    if int(os.environ[_SERVER]) not in (one.pid for one in psutil.Process().parents()):
        sys.exit("the server has ended")

logger = logging.getLogger("swift_r1.inference")

_DRAIN_S = 30
_BACKLOG = 2048


def main(argv: Sequence[str]) -> int:
    """Serves until a signal or the engine's death; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if len(argv) != 1:
        print("usage: python -m swift_r1.inference.server ARGS.json", file=sys.stderr)
        return EXIT_USAGE
    stop_at_once()
    os.environ[_SERVER] = str(os.getpid())
    from swift_r1.weights.staging import socket_folder

    config = None
    try:
        config = ServerConfig.from_args(json.loads(Path(argv[0]).read_text())["args"])
        config.check()
        listener = bind(config.host, config.port)
        with socket_folder() as sockets:
            os.environ.setdefault("VLLM_RPC_BASE_PATH", str(sockets))
            return asyncio.run(serve(config, listener))
    except SwiftError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        if config is not None and config.merged:
            shutil.rmtree(config.model, ignore_errors=True)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, taken before the model loads.

    Raises:
        PortTaken: if another process listens there.
        UsageError: if the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: without it asyncio does not know that this is TCP and leaves Nagle's algorithm on, by which
    # every answer is held back for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} on {host} is taken: stop who listens there or give another --port") from error
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


async def serve(config: ServerConfig, listener: socket.socket) -> int:
    """Answers on `listener` at once, `/ready` once the engine has loaded.

    Raises:
        UsageError: where loading found a fault of the arguments.
        RunFailed: where loading failed otherwise, or the engine died.
    """
    import uvicorn

    from swift_r1.inference.lifecycle import Lifecycle
    from swift_r1.inference.routes import create_app
    from swift_r1.weights.staging import remove_leftovers

    remove_leftovers()
    lifecycle = Lifecycle(config, lambda: load_engine(config))

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are ours: uvicorn's way would kill the process before the engine is shut down."""
            yield

    server = Server(
        uvicorn.Config(
            create_app(lifecycle, config.api_key),
            log_config=None,
            access_log=False,
            lifespan="off",  # the application has none, and its end would be logged as an error where loading failed
            timeout_graceful_shutdown=_DRAIN_S,
            timeout_keep_alive=120,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        )
    )
    code = _stop_on_signals(server)
    http = asyncio.create_task(server.serve([listener]))
    life = asyncio.create_task(lifecycle.run())
    try:
        await asyncio.wait({http, life}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        server.force_exit = server.force_exit or lifecycle.dead is not None
        await http
    finally:
        life.cancel()
        with suppress(asyncio.CancelledError):
            await life
        await asyncio.to_thread(lifecycle.close)
        remove_leftovers()
    if code[0] != EXIT_OK:
        # A signal to the whole process group ends the engine too; that is no failure.
        return code[0]
    if isinstance(lifecycle.failure, SwiftError):
        raise lifecycle.failure
    if lifecycle.failure is not None:
        logger.error("loading failed", exc_info=lifecycle.failure)
    if lifecycle.dead is not None:
        raise RunFailed(lifecycle.dead)
    return code[0]


def load_engine(config: ServerConfig):
    """Starts vLLM; the model's skeleton tells which weights an update must bring."""
    from swift_r1.inference.engines.vllm_start import start_vllm
    from swift_r1.weights.expected import expected_weights, most_bytes

    expected = expected_weights(config.model, config.trust_remote_code)
    # A terminal's Ctrl-C goes to the engine's processes too, which would end at once: the server decides when they do.
    # They inherit this thread's mask; SIGTERM, by which they are ended, stays open. The tracker is started first: doing
    # so unblocks SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return start_vllm(config, most_bytes(expected)), expected
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_on_signals(server) -> list[int]:
    """Lets SIGINT and SIGTERM end the server (a second one without draining); holds the exit code."""
    code = [EXIT_OK]
    loop = asyncio.get_running_loop()

    def stop(received: signal.Signals) -> None:
        if server.should_exit:
            server.force_exit = True
        server.should_exit = True
        code[0] = 128 + received
        logger.info("%s: no new requests, up to %d s for running ones", received.name, _DRAIN_S)

    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, stop, one)
    return code


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
