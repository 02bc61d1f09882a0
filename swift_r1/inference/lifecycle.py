"""The server's life: loading, serving, dead; and the watch over the engine."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from swift_r1.inference.config import ServerConfig
from swift_r1.inference.engines.base import InferenceEngine
from swift_r1.inference.metrics import ServerMetrics
from swift_r1.inference.service import RolloutService
from swift_r1.weights.expected import Shapes
from swift_r1.wire.http_errors import HTTPError

logger = logging.getLogger("swift_r1.inference")

_WATCH_EVERY_S = 0.25
# So that whoever asks next learns from /health what happened, instead of finding no one.
_DEAD_GRACE_S = 3.0

Load = Callable[[], tuple[InferenceEngine, Shapes]]


class Lifecycle:
    """Loads the engine in the background, watches it, and says when the process must end.

    Attributes:
        service: the loaded server, None before.
        dead: why it cannot serve any more, None while it lives.
        failure: what loading raised.
    """

    def __init__(self, config: ServerConfig, load: Load) -> None:
        self._config = config
        self._load = load
        self.metrics = ServerMetrics()
        self.service: RolloutService | None = None
        self.dead: str | None = None
        self.failure: BaseException | None = None

    @property
    def why_not_ready(self) -> str | None:
        if self.dead is not None:
            return self.dead
        if self.service is None:
            return "the model is being loaded"
        return self.service.admission.why_closed

    def loaded(self) -> RolloutService:
        """Raises HTTPError (503) before the engine has loaded and after it died."""
        if self.service is None or self.dead is not None:
            raise HTTPError(503, self.why_not_ready or "", 5)
        return self.service

    async def run(self) -> None:
        """Loads, then watches; returns once the server cannot serve (see `dead` and `failure`)."""
        try:
            engine, expected = await self._loading()
        except Exception as error:  # noqa: BLE001 - whatever it is, the process reports it and ends
            self.failure = error
            self.dead = f"the model could not be loaded: {str(error).splitlines()[0] if str(error) else repr(error)}"
            return
        self.service = RolloutService(self._config, engine, expected, self.metrics)
        logger.info(
            "serving %s, %d weights, max_model_len %d", self._config.model, len(expected), engine.info.max_model_len
        )
        leases = asyncio.create_task(self.service.updating.watch_leases())
        try:
            while not engine.dead:
                await asyncio.sleep(_WATCH_EVERY_S)
        finally:
            leases.cancel()
        self.dead = "the engine died"
        logger.error("the engine died; this server ends in %g s", _DEAD_GRACE_S)
        await asyncio.sleep(_DEAD_GRACE_S)

    async def _loading(self) -> tuple[InferenceEngine, Shapes]:
        """In a thread of its own, which lives on: the kernel ends the engine's processes with the thread that started
        them. It holds up nobody's end, as one of a pool would."""
        loaded: Future[tuple[InferenceEngine, Shapes]] = Future()
        loaded.set_running_or_notify_cancel()

        def load() -> None:
            try:
                loaded.set_result(self._load())
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                loaded.set_exception(error)
            threading.Event().wait()

        threading.Thread(target=load, name="engine", daemon=True).start()
        return await asyncio.wrap_future(loaded)

    def close(self) -> None:
        if self.service is not None:
            self.service.close()
