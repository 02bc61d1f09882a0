"""The driver's end of an agent."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from swift_r1.errors import SwiftError, one_line
from swift_r1.fleet.backend import AgentPipe, ClusterBackend, Node

Event = Mapping[str, Any]
_PING_S = 1.0
_PING = b'{"do": "ping", "ask": 0}\n'


class AgentClient:
    """Connects to an agent in a thread of its own, which then puts what that says into `events`, as pairs of this and
    the event; the last is `gone`, with `text`. Another thread sends the orders, and lets the agent hear from here
    between them: neither a dead connection nor a driver that waits for its terminal or its disk is anybody's end.

    Attributes:
        about: what the agent's `hello` said; None before that.
        heard: when it last said something (`time.monotonic`).
    """

    def __init__(self, backend: ClusterBackend, node: Node, events: SimpleQueue[Any]) -> None:
        self.node = node
        self.heard = time.monotonic()
        self.about: Event | None = None
        self._backend = backend
        self._events = events
        self._pipe: AgentPipe | None = None
        self._orders: SimpleQueue[bytes | None] = SimpleQueue()
        self._closed = threading.Event()
        self._asked: dict[int, Callable[[Event], None]] = {}
        self._number = 0
        self._thread = threading.Thread(
            target=self._listen, name=f"agent of {node.name}", daemon=True
        )
        self._thread.start()

    def _listen(self) -> None:
        try:
            self._pipe = self._backend.connect(self.node)
            if self._closed.is_set():
                self._pipe.close()
            threading.Thread(
                target=self._send, args=(self._pipe,), name=f"to {self.node.name}", daemon=True
            ).start()
            text = self._pass_on(self._pipe)
        except (SwiftError, OSError) as error:
            text = one_line(error)
        self._events.put((self, {"event": "gone", "text": text}))
        self._orders.put(None)
        if self._pipe is not None:
            self._pipe.close()

    def _send(self, pipe: AgentPipe) -> None:
        """Sends orders until there is nothing more to send, or the agent is gone, which `gone` says."""
        while True:
            try:
                order = self._orders.get(timeout=_PING_S)
            except Empty:
                if self.about is None:
                    continue
                order = _PING
            if order is None:
                return
            try:
                pipe.send(order)
            except (OSError, ValueError):  # ValueError: it is closed
                return

    def _pass_on(self, pipe: AgentPipe) -> str:
        """Passes on what the agent says, to its end; returns why that came."""
        for line in iter(pipe.receive, b""):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if not isinstance(event, dict) or "event" not in event:
                said = line.decode(errors="replace").strip()[:200]
                return f"{said!r} came in the place of an agent's words: does its shell print at login?"
            self.heard = time.monotonic()
            if event.get("ask") != 0:
                self._events.put((self, event))
        return pipe.last_words()

    def tell(self, do: str, **values: Any) -> None:
        """Gives an order, without waiting. Where the agent is gone this does nothing: `gone` says so."""
        self._orders.put(json.dumps({"do": do, **values}).encode() + b"\n")

    def ask(self, do: str, then: Callable[[Event], None], **values: Any) -> None:
        """Gives an order and calls `then` with the answer, when the driver hands that to `answered`."""
        self._number += 1
        self._asked[self._number] = then
        self.tell(do, ask=self._number, **values)

    def answered(self, event: Event) -> None:
        self._asked.pop(event["ask"])(event)

    @property
    def over(self) -> bool:
        """Says whether the way to the agent has ended too, which it does when the agent has ended what it started."""
        return not self._thread.is_alive()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self, wait_s: float) -> None:
        """Ends the agent with all that it has started; waits until that is done, `wait_s` at most."""
        self._closed.set()
        if self._pipe is not None:
            self._pipe.close()
        self._thread.join(wait_s)
