"""Who sends weights to whom: rank 0 to a few servers, and each of those to a few others, bucket by bucket.

With N servers, a fan-out of F and B buckets rank 0 sends F times the weights instead of N times, and the last server
has them after about F * (B + log_F N) times a bucket's time on the network instead of N * B.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swift_r1.wire.client import RolloutClient

_LOOK_S = 2.0
_AUTO_FANOUT = 2
_AUTO_FROM = 5


def fanout_of(asked: int | None, servers: int) -> int:
    """To how many of so many servers that take weights over the network rank 0 sends them, as `--weight_fanout` asks:
    0 is to all, None chooses."""
    if asked is None:
        return _AUTO_FANOUT if servers >= _AUTO_FROM else 0
    return asked if asked < servers else 0


def parent_of(index: int, fanout: int) -> int | None:
    """From whom the server at `index` gets weights, None for rank 0: the tree is filled level by level."""
    return index // fanout - 1 if index >= fanout else None


def levels_of(servers: int, fanout: int) -> int:
    """Of the tree that so many servers make; 1 where all get the weights from rank 0."""
    if not fanout:
        return 1
    levels = 0
    width = 1
    while servers > 0:
        width *= fanout
        servers -= width
        levels += 1
    return levels


@dataclass(eq=False)
class Link:
    """A server's place in the tree, for one push: whom the weights come from, None for rank 0, and to how many it
    passes them on. `is_wanted` says whether its push goes on."""

    client: RolloutClient
    token: str
    is_wanted: Callable[[], bool] = lambda: True
    parent: Link | None = None
    children: int = 0
    _told: threading.Event = field(default_factory=threading.Event)
    _open: bool = False

    def tell(self, is_open: bool) -> None:
        """Whether the server takes this version; the first word counts."""
        if not self._told.is_set():
            self._open = is_open
            self._told.set()

    def wait_until_open(self) -> bool:
        """Waits until the server takes this version, or is known not to."""
        while not self._told.wait(_LOOK_S):
            if not self.is_wanted():
                return False
        return self._open


def joined(links: Sequence[Link], fanout: int) -> Iterator[Link]:
    """Makes a tree of them; yields them."""
    for index, link in enumerate(links):
        if fanout and (above := parent_of(index, fanout)) is not None:
            link.parent = links[above]
            links[above].children += 1
    yield from links
