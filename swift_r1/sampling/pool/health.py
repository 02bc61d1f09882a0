"""Which of several rollout servers take work: lost ones are looked for, and come back with the newest weights.

Each lost server has a thread that waits for it, pushes what `KeptWeights` holds, and lets it work again; no other rank
has a part in that, so it goes on in the middle of a round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from swift_r1.errors import RunFailed, ServerUnreachable, SwiftError
from swift_r1.sampling.pool.client import RolloutClient
from swift_r1.sampling.pool.session import GIVEN_UP, ServerLink, ServerLost
from swift_r1.weights.snapshot import KeptWeights, Superseded
from swift_r1.wire.protocol import ServerInfo

logger = logging.getLogger("swift_r1.sampling.pool.pool")

LOOK_S = 0.2
TELL_EVERY_S = 2.0
_QUIET_S = 60.0
_ALIKE = ("model", "tokenizer_hash", "vocab_size", "dtype", "max_model_len", "max_lora_rank", "engine_version")


def why_not_alike(servers: Sequence[tuple[str, ServerInfo]]) -> str | None:
    """What keeps servers, each with its URL, from being used as one, in one line."""
    seen: dict[str, str] = {}
    for url, info in servers:
        if info.instance in seen:
            return f"{seen[info.instance]} and {url} are the same rollout server: name each once"
        seen[info.instance] = url
    (first_url, first), *others = servers
    for url, info in others:
        for name in _ALIKE:
            one, other = getattr(first, name), getattr(info, name)
            if one == other:
                continue
            if name == "tokenizer_hash":
                return f"the rollout servers at {first_url} and {url} have different tokenizers: start them alike"
            return f"the rollout server at {first_url} has {name} {one}, that at {url} {other}: start them alike"
    return None


class Member:
    """One of several servers.

    Attributes:
        ready: whether it holds the newest version and takes work.
        failed: why it is given up for good, None while it is not.
        epoch: a number for each time that it was lost; what belongs to an earlier one no longer counts.
        pushing: the thread of the last push to it; two at once would disturb each other.
    """

    def __init__(self, client: RolloutClient, link: ServerLink) -> None:
        self.client, self.link, self.url = client, link, client.base_url
        self.ready = True
        self.failed: SwiftError | None = None
        self.epoch = 0
        self.pushing: threading.Thread | None = None
        self._quiet_until = 0.0

    def report(self, line: str, alone: bool) -> None:
        """The countdown, seldom while others work."""
        now = time.monotonic()
        if alone or now >= self._quiet_until:
            logger.info(line)
            self._quiet_until = now + _QUIET_S


class Roster:
    """Who is ready, lost, or given up.

    Args:
        kept: what a server that comes back is brought to.
        timeout_s: longest wait with no server at all; a line says when one has been away for as long.
    """

    def __init__(self, members: Sequence[Member], kept: KeptWeights, timeout_s: float) -> None:
        self.members, self._kept, self._timeout_s = members, kept, timeout_s
        self._changed = threading.Condition()
        self._closed = False
        self._none_since: float | None = None
        self._returned = False
        self._listeners: set[Callable[[], None]] = set()

    def close(self) -> None:
        """Ends the looking for lost servers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def ready(self) -> list[Member]:
        with self._changed:
            return [one for one in self.members if one.ready]

    def take_returned(self) -> bool:
        """Whether a server came back since the last call."""
        with self._changed:
            returned, self._returned = self._returned, False
        return returned

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """`listener` is called, in any thread, when a server comes back; returns what ends that."""
        with self._changed:
            self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def lose(self, member: Member, epoch: int) -> None:
        """Takes a server out, unless it was taken out since `epoch`, and has it looked for."""
        with self._changed:
            if member.epoch != epoch or not member.ready or self._closed:
                return
            left = self._take_out(member)
        others = f"its work goes to the other {left}" if left > 1 else "its work goes to the other one"
        logger.warning("the rollout server at %s is lost: %s", member.url, others if left else "there is no other one")
        threading.Thread(target=self._heal, args=(member,), name=f"heal {member.url}", daemon=True).start()

    def give_up(self, member: Member, epoch: int, error: SwiftError) -> None:
        """Takes a server out for good, unless it was taken out since `epoch`."""
        with self._changed:
            if member.epoch != epoch:
                return
            member.failed = error
            self._take_out(member)
        logger.error("the rollout server at %s is given up: %s", member.url, error)

    def check_any(self) -> None:
        """Raises ServerUnreachable once there has been no server for `timeout_s`; what was the matter with the last one
        once all are given up."""
        with self._changed:
            if any(one.ready for one in self.members):
                return
            away = time.monotonic() - (self._none_since or time.monotonic())
            failed = [one.failed for one in self.members if one.failed is not None]
        if len(failed) == len(self.members):
            raise failed[-1]
        if away > self._timeout_s:
            urls = ", ".join(one.url for one in self.members)
            raise ServerUnreachable(
                f"no rollout server came back within {self._timeout_s:g} s ({urls}); start one with `swift rollout`"
            )

    def wait_for_any(self, while_waiting: Callable[[], None]) -> None:
        """Waits until a server is ready; raises as `check_any`."""
        told = time.monotonic()
        while not self.ready:
            self.check_any()
            with self._changed:
                self._changed.wait(LOOK_S)
            if time.monotonic() - told > TELL_EVERY_S:
                while_waiting()
                told = time.monotonic()

    def _take_out(self, member: Member) -> int:
        """Returns how many are left."""
        member.ready = False
        member.epoch += 1
        left = sum(one.ready for one in self.members)
        if not left:
            self._none_since = self._none_since or time.monotonic()
        self._changed.notify_all()
        return left

    def _heal(self, member: Member) -> None:
        """Looks for a lost server until it is back with the newest weights, is given up, or the run ends."""
        epoch, overdue = member.epoch, False
        while not self._closed:
            try:
                if self._bring_back(member):
                    return
            except _Closed:
                return
            except (Superseded, ServerLost):
                continue
            except SwiftError as error:
                if isinstance(error, GIVEN_UP) or not isinstance(error, ServerUnreachable):
                    self.give_up(member, epoch, error)
                    return
                if not overdue:
                    going_on = f"going on with {len(self.ready)} of {len(self.members)} servers"
                    logger.warning("%s: %s", error, going_on if self.ready else "there is no other one")
                overdue = True
            except Exception as error:
                if not self._closed:  # else its connections were closed under it
                    logger.exception("bringing %s back failed", member.url)
                    self.give_up(member, epoch, RunFailed(f"bringing {member.url} back failed: {error!r}"))
                return

    def _bring_back(self, member: Member) -> bool:
        """Waits for it, at most the link's time; whether it was brought to what is still the newest version.

        Raises:
            ServerUnreachable: it did not come. Others: as `ServerLink.push`.
        """
        with self._changed:
            # While a version is written it is waited for: the training thread hands it over, or ends the run.
            while not self._kept.whole:
                self._check_open()
                self._changed.wait(LOOK_S)
            version = self._kept.version
        target = member.link.reconnect(
            version, self._check_open, lambda line: member.report(line, not self.ready), exactly=True
        )
        if member.pushing is not None and member.pushing.is_alive():
            # A push that it was lost in hears of it with its next answer, and ends; it may have done its work.
            while member.pushing.is_alive():
                self._check_open()
                member.pushing.join(LOOK_S)
            return False
        if target is not None:
            member.link.push(version, self._kept.reading(version, copy=True), self._kept.adapter)
        with self._changed:
            if self._kept.version != version or not self._kept.whole or self._closed:
                return False
            member.ready, self._returned, self._none_since = True, True, None
            count = sum(one.ready for one in self.members)
            self._changed.notify_all()
            listeners = list(self._listeners)
        logger.info(
            "the rollout server at %s is back with weight version %d: %d of %d servers",
            *(member.url, version, count, len(self.members)),
        )
        for listener in listeners:
            listener()
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise _Closed


class _Closed(Exception):
    """The run ends."""
