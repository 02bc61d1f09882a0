"""Which ranks are alive: what tells a rank that works for long from one that hangs (`--ddp_timeout`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist

logger = logging.getLogger(__name__)

_EVERY_S = 5.0


class LostRank(Exception):
    """A rank has said nothing for `--ddp_timeout` seconds while another waited for it."""


class Presence:
    """Signs of life through the store of the process group.

    A rank that waits in a collective says so every few seconds, and so does one that is `busy` with what the others
    wait for: rewards, a save, the rollout server. Whoever waits gives a rank up once it has said nothing for
    `timeout_s`. A process that was stopped says nothing; one that is busy for ever is its own watchdog's affair.

    Args:
        store: shared by the ranks; nobody else uses these keys.
        heard: called every few seconds while this rank waits and has heard from all others.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout_s: float, heard: Callable[[str], None]
    ) -> None:
        self._store, self._rank, self._timeout_s, self._heard = store, rank, timeout_s, heard
        self._others = [other for other in range(world_size) if other != rank]
        self._every_s = min(_EVERY_S, timeout_s / 4)
        self._say()

    def wait(self, work: dist.Work) -> None:
        """Until the collective is done.

        Raises:
            LostRank: a rank that it needs is silent.
            RuntimeError: what the collective says of a broken connection.
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
        """While this is open, a thread says that this rank is alive."""
        return self._every_few_seconds(self._say)

    @contextmanager
    def _every_few_seconds(self, work: Callable[[], None]) -> Iterator[None]:
        """Does it in a thread: a store whose host was stopped never answers."""
        ended = threading.Event()

        def go_on() -> None:
            try:
                work()
                while not ended.wait(self._every_s):
                    work()
            except RuntimeError as error:  # this rank's next collective says so too, where it can be handled
                logger.warning("the other ranks cannot be told that this one is alive: %s", error)

        thread = threading.Thread(target=go_on, name="presence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(self._every_s)

    def _listen(self, said: dict[int, bytes], since: dict[int, float], answered: list[float]) -> None:
        """Says that this rank is alive, and notes who else has said so since the last time."""
        self._say()
        words = self._store.multi_get([str(other) for other in self._others])
        answered[0] = time.monotonic()
        for other, word in zip(self._others, words, strict=True):
            if said.get(other) != word:
                said[other], since[other] = word, answered[0]

    def _say(self) -> None:
        self._store.add(str(self._rank), 1)

    def _done(self, work: dist.Work) -> bool:
        """Whether it is done, after a moment."""
        try:
            work.wait(timedelta(seconds=self._every_s))
        except RuntimeError:
            # gloo tells by its text alone that only the moment is over.
            if work.is_completed():
                raise
            return False
        return True
