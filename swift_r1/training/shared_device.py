"""Engine and trainer take turns on the memory of one GPU (`--sleep_level`, `--offload_model`, `--offload_optimizer`).

| now | engine | trainer's weights | optimizer |
|---|---|---|---|
| generating, evaluating | awake | on the host with `--offload_model` | on the host with `--offload_optimizer` |
| publishing | its weights are woken when the new ones are loaded | on the device | on the host, as above |
| training | asleep with `--sleep_level` | on the device | on the device |
| saving | asleep, its weights kept | on the device | on the device |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from swift_r1.flags import RunFlags
from swift_r1.record.spans import Stopwatch
from swift_r1.rollout.base import Rollouts
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.training.backends.base import Backend, Movable


class Frozen(Protocol):
    """A model that is not trained."""

    weights: Movable


class SharedDevice:
    """Whose turn it is. All methods are collective, and do nothing without those flags, or where it is so already.

    `trained` are the policy and PPO's critic, `frozen` are reference and teacher; `timed` names what this takes on the
    stopwatch.
    """

    def __init__(
        self,
        args: RunFlags,
        device: torch.device,
        rollouts: Rollouts,
        trained: Sequence[Backend],
        frozen: Sequence[Frozen],
        stopwatch: Stopwatch,
    ) -> None:
        self._stopwatch = stopwatch
        self._device = device
        self._level = args.sleep_level
        self._weights = [one.weights for one in (*trained, *frozen)] if args.offload_model else []
        self._states = [one.states for one in trained] if args.offload_optimizer else []
        self._engine: ServerRollouts | None = None  # one that sleeps
        if self._level and isinstance(rollouts, ServerRollouts) and rollouts.can_sleep:
            self._engine = rollouts
        self._shares = self._engine is not None or args.offload_model or args.offload_optimizer
        self.timed = [
            name for name, used in (("sleep", self._engine), ("offload", self._shares)) if used
        ]
        self._asleep = False  # as far as is known: an engine that was started again is awake
        if self._engine is not None:
            # Within a publication, whose time has a name already.
            self._engine.before_scoring = self._let_engine_work

    def to_generate(self) -> None:
        """Lets the engine be asked."""
        if self._shares:
            with self._stopwatch.timed("offload"):
                self._leave([*self._weights, *self._states])
        if self._engine is not None:
            with self._stopwatch.timed("sleep"):
                self._let_engine_work()

    def to_train(self) -> None:
        """Models can compute and be updated. The engine's weights, which are about to be old ones, may be lost."""
        self._to_train(self._level)

    def to_save(self) -> None:
        """Lets models compute, while the engine keeps its weights: the next round may need them."""
        self._to_train(min(self._level, 1))

    def to_publish(self) -> None:
        """The weights can be gathered, and there is room for those of the engine beside them."""
        if self._shares:
            with self._stopwatch.timed("offload"):
                self._leave(self._states)
            self._asleep = False  # the load wakes a part of it

    def _to_train(self, level: int) -> None:
        if not self._shares:
            return
        if self._engine is not None and not self._asleep:
            with self._stopwatch.timed("sleep"):
                self._engine.sleep(level)
            self._asleep = True
        with self._stopwatch.timed("offload"):
            for one in (*self._weights, *self._states):
                one.come_back()

    def _let_engine_work(self) -> None:
        assert self._engine is not None
        self._leave([*self._weights, *self._states])
        self._engine.wake()
        self._asleep = False

    def _leave(self, tensors: Sequence[Movable]) -> None:
        for one in tensors:
            one.leave(self._device)
        if self._device.type == "cuda":
            # what torch keeps for later is of no use to the engine's process
            torch.cuda.empty_cache()
