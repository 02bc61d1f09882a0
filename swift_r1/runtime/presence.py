"""Which ranks are alive: tells a rank that works for long from one that hangs (`--ddp_timeout`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # `dist.Store`, which torch does not export to mypy

logger = logging.getLogger(__name__)

_EVERY_S = 5.0


class LostRank(Exception):
    """A rank was silent for `--ddp_timeout` seconds while another waited for it."""


class Presence:
    """Heartbeats through the store of the process group.

    A rank that waits in a collective sends one every few seconds, and so does one that is `busy` with what the others
    wait for: rewards, a save, the rollout server. A waiting rank gives up on one that has been silent for `timeout_s`.
    A stopped process is silent; one that is busy for ever is ended by its own watchdog.

    Args:
        store: shared by the ranks; nothing else uses these keys.
        heard: called every few seconds while this rank waits and has heard from all others.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout_s: float, heard: Callable[[str], None]
    ) -> None:
        self._store, self._rank, self._timeout_s, self._heard = store, rank, timeout_s, heard
        self._others = [other for other in range(world_size) if other != rank]
        self._every_s = min(_EVERY_S, timeout_s / 4)
        self._say()

    def wait(self, work: dist.Work) -> None:
        """Waits until the collective is done.

        Raises:
            LostRank: a rank that it needs is silent.
            RuntimeError: the collective's, about a broken connection.
        """
        if not self._others:
            work.wait()
            return
        if self._done(work):
            return
        now = time.monotonic()
        since, answered = dict.fromkeys(self._others, now), [now]
        with self._every_few_seconds(partial(self._listen, {}, since, answered)):
            while not self._done(work):
                now = time.monotonic()
                silent = min(self._others, key=since.__getitem__)
                if now - since[silent] > self._timeout_s:
                    what = f"rank {silent} has said nothing"
                    if now - answered[0] > self._timeout_s:
                        what = "the host of the ranks' store (rank 0's launcher) has not answered"
                    raise LostRank(f"{what} for {self._timeout_s:g} s (--ddp_timeout)")
                if now - since[silent] < 3 * self._every_s:
                    self._heard("waiting for the other ranks")

    def busy(self) -> AbstractContextManager[None]:
        """While open, a thread sends heartbeats."""
        return self._every_few_seconds(self._say)

    @contextmanager
    def _every_few_seconds(self, work: Callable[[], None]) -> Iterator[None]:
        """Calls `work` in a thread: a store whose host was stopped never answers."""
        ended = threading.Event()

        def repeat() -> None:
            try:
                work()
                while not ended.wait(self._every_s):
                    work()
            except RuntimeError as error:  # the next collective raises too, where it can be handled
                logger.warning("the other ranks cannot be told that this one is alive: %s", error)

        thread = threading.Thread(target=repeat, name="presence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(self._every_s)

    def _listen(self, said: dict[int, bytes], since: dict[int, float], answered: list[float]) -> None:
        """Sends a heartbeat, and notes whose have come since the last time."""
        self._say()
        words = self._store.multi_get([str(other) for other in self._others])
        answered[0] = time.monotonic()
        for other, word in zip(self._others, words, strict=True):
            if said.get(other) != word:
                said[other], since[other] = word, answered[0]

    def _say(self) -> None:
        self._store.add(str(self._rank), 1)

    def _done(self, work: dist.Work) -> bool:
        """Whether it is done, after waiting a moment."""
        try:
            work.wait(timedelta(seconds=self._every_s))
        except RuntimeError:
            # gloo's timeout is a plain RuntimeError.
            if work.is_completed():
                raise
            return False
        return True
