"""`python -m swift_r1.serving.server ARGS.json`, the process behind `swift rollout`; the file has the resolved flags
as `{"args": {...}}`."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from swift_r1.errors import EXIT_OK, EXIT_USAGE, PortTaken, RunFailed, SwiftError, UsageError
from swift_r1.flags.server import RolloutArguments, host_faults
from swift_r1.runtime.libraries import large_imports
from swift_r1.runtime.processes import end_with_parent, leave, stop_at_once
from swift_r1.runtime.visible import harmless, log_visibly

if TYPE_CHECKING:
    import uvicorn

    from swift_r1.models.expected import Shapes
    from swift_r1.serving.engines.base import InferenceEngine

_SERVER = "SWIFT_R1_SERVER"  # its process id, for its engine's processes

if __name__ == "__mp_main__":
    # A process of vLLM's, which imports this module first: none outlives the server.
    end_with_parent(signal.SIGKILL)
    if int(os.environ[_SERVER]) not in (one.pid for one in psutil.Process().parents()):
        sys.exit("the server has ended")
    with large_imports():
        import vllm.v1.engine.core  # noqa: F401  which it would import next

logger = logging.getLogger("swift_r1.serving")

_DRAIN_S = 30
_KILLED_S = 10  # for a process that was killed to be gone
_BACKLOG = 2048


def main(argv: Sequence[str]) -> int:
    """Serves until a signal or the engine's death; returns the exit code."""
    log_visibly(logging.INFO, "%(asctime)s %(who)s%(message)s")
    if len(argv) != 1:
        print("usage: python -m swift_r1.serving.server ARGS.json", file=sys.stderr)
        return EXIT_USAGE
    stop_at_once()
    os.environ[_SERVER] = str(os.getpid())
    from swift_r1.sync.staging import socket_folder

    args = json.loads(Path(argv[0]).read_text())["args"]
    merged = args.pop("merged", False)  # the model was made from --adapters for this server alone
    config = RolloutArguments.from_dict(args)
    try:
        if not config.model:
            raise UsageError("swift rollout needs --model")
        faults = host_faults(config.host, config.api_key)
        if faults:
            raise UsageError(*faults)
        listener = bind(config.host, config.port)
        with socket_folder() as sockets:
            os.environ.setdefault("VLLM_RPC_BASE_PATH", str(sockets))
            return asyncio.run(serve(config, listener))
    except SwiftError as error:
        print(harmless(str(error)), file=sys.stderr)
        return error.exit_code
    finally:
        if merged:
            shutil.rmtree(config.model, ignore_errors=True)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, opened before the model loads. Raises PortTaken, or UsageError where the address is not this
    machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named asyncio turns Nagle's algorithm off, which would hold every answer back for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} on {host} is taken: stop who listens there or give another --port"
            ) from error
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


async def serve(config: RolloutArguments, listener: socket.socket) -> int:
    """Answers on `listener` at once; ready once the engine has loaded.

    Raises:
        UsageError: loading found a fault of the arguments.
        RunFailed: the engine died.
    """
    import uvicorn

    from swift_r1.serving.routes import create_app
    from swift_r1.serving.service import Lifecycle
    from swift_r1.sync.staging import remove_leftovers

    remove_leftovers()
    lifecycle = Lifecycle(config, lambda: load_engine(config))

    class DrainingServer(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are ours: uvicorn's way would kill the process before the engine is shut down."""
            yield

    server = DrainingServer(
        uvicorn.Config(
            create_app(lifecycle, config.api_key),
            log_config=None,
            access_log=False,
            # the application has none, and its end would be logged as an error where loading failed
            lifespan="off",
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
        # that still loads, or that vLLM has killed and not collected
        for left in multiprocessing.active_children():
            left.kill()
            await asyncio.to_thread(left.join, _KILLED_S)
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


def load_engine(config: RolloutArguments) -> tuple[InferenceEngine, Shapes]:
    """Starts the engine; the model's skeleton tells which weights an update must bring."""
    with large_imports():
        from swift_r1.models.expected import expected_weights
        from swift_r1.serving.engines.vllm_start import start_vllm
        from swift_r1.sync.buckets import most_bytes

        # which imports torch and the model's class
        expected = expected_weights(config.model, towers=config.max_images > 0)
    # A terminal's Ctrl-C goes to the engine's processes too, but the server decides when they end: they inherit this
    # thread's mask. The tracker is started first, since that unblocks SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return start_vllm(config, most_bytes(expected)), expected
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_on_signals(server: uvicorn.Server) -> list[int]:
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
