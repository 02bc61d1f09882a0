"""An engine that gives its memory back between rounds (`--sleep_level`).

    awake --sleep--> asleep --wake--> awake (same version)
                       |  `--commit--> asleep, but the new weights are in place --wake--> awake (version N+1)

At level 1 the weights are kept in host memory. At level 2 they are gone: the server then holds no whole version
(`UpdateMachine.broken`) until a full push has been committed.
"""

from __future__ import annotations

import logging

from swift_r1.flags.server import RolloutArguments
from swift_r1.serving.admission import Admission
from swift_r1.serving.engines.base import InferenceEngine
from swift_r1.sync.staging import Staging
from swift_r1.sync.update import UpdateMachine
from swift_r1.wire import protocol as wire
from swift_r1.wire.protocol import HTTPError

logger = logging.getLogger("swift_r1.serving")


class Sleeping:
    """Puts one engine to sleep and wakes it, for the holder of the lease on the weights (409 for others). `level` is 0
    while the whole engine is awake."""

    def __init__(
        self,
        config: RolloutArguments,
        engine: InferenceEngine,
        admission: Admission,
        machine: UpdateMachine,
        staging: Staging,
    ) -> None:
        self._adapters = config.vllm_enable_lora
        self._engine = engine
        self._admission = admission
        self._machine = machine
        self._staging = staging
        self.level = 0
        self._weights_away = False

    def status(self) -> wire.SleepStatus:
        return wire.SleepStatus(asleep=self.level, weight_version=self._machine.version, broken=self._machine.broken)

    async def sleep(self, token: str | None, request: wire.SleepRequest) -> wire.SleepStatus:
        """New work is refused from now on; what runs ends first. An engine that sleeps already stays at its level.
        Raises HTTPError: 409 while an update is open, 422 where the engine cannot sleep, 503 if running work did not
        end in time (it stays awake)."""
        self._machine.check_holder(token)
        if not self._engine.info.can_sleep:
            raise HTTPError(422, "this engine cannot sleep: vLLM can on a GPU, started with enable_sleep_mode")
        if self._adapters and request.level > 1:
            raise HTTPError(422, "with --vllm_enable_lora true adapters need the weights that sleep level 2 discards")
        self._check_no_update()
        if self.level and self._weights_away:
            return self.status()
        self._refuse_work(request.level)
        try:
            await self._admission.drained("the engine's sleep")
            async with self._admission.exclusive:
                self._check_no_update()
                if self._weights_away:  # a second call at the same time has done it
                    return self.status()
                await self._engine.sleep(request.level)
                self.level = request.level
                self._weights_away = True
                if request.level > 1:
                    self._machine.discarded()
                    self._staging.base = None  # changes to what is gone are not accepted
        finally:
            self._refuse_work(self.level)
        logger.info("the engine sleeps at level %d", self.level)
        return self.status()

    async def wake(self, token: str | None) -> wire.SleepStatus:
        """Brings all its memory back; an engine that is awake stays so."""
        self._machine.check_holder(token)
        async with self._admission.exclusive:
            if self.level:
                await self._engine.wake()
                self.level = 0
                self._weights_away = False
                self._refuse_work(0)
                logger.info("the engine is awake")
        return self.status()

    async def wake_weights(self) -> None:
        """Makes room for new weights alone. Whoever loads them holds the admission's `exclusive`."""
        if self._weights_away:
            await self._engine.wake(weights_only=True)
            self._weights_away = False

    def _refuse_work(self, level: int) -> None:
        self._admission.asleep = f"the engine sleeps (level {level}) until its trainer wakes it" if level else None
        self._admission.notify()

    def _check_no_update(self) -> None:
        version = self._machine.pending_version
        if version is not None:
            raise HTTPError(409, f"the update to weight version {version} is open: commit it before the engine sleeps")
