"""Idempotent requests: a repeated request id gets the answer of the first time, or joins its generation."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swift_r1.wire.protocol import HTTPError, RolloutOutput, RolloutRequest


@dataclass(slots=True)
class _Entry:
    fingerprint: bytes
    task: asyncio.Task[RolloutOutput]
    waiters: int = 0
    tokens: int = 0


class IdempotencyCache:
    """Keeps the newest finished requests: `max_requests` of them, and `max_tokens` tokens.

    A generation is cancelled when everyone who waits for it has gone. Failures are not kept.
    """

    def __init__(self, max_requests: int = 4096, max_tokens: int = 1_000_000) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def answer(
        self, request: RolloutRequest, generate: Callable[[RolloutRequest], Awaitable[RolloutOutput]]
    ) -> RolloutOutput:
        """The output of `request`, generated at most once for its id. Raises HTTPError (409) where the id was used for
        another request."""
        fingerprint = hashlib.sha256(request.model_dump_json().encode()).digest()
        entry = self._entries.get(request.request_id)
        if entry is None:
            entry = _Entry(fingerprint, asyncio.ensure_future(generate(request)))
            self._entries[request.request_id] = entry
            entry.task.add_done_callback(lambda task: self._finished(request.request_id, entry, task))
        elif entry.fingerprint != fingerprint:
            raise HTTPError(409, f"request_id {request.request_id!r} was used before for a different request")
        entry.waiters += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiters -= 1
            if entry.waiters == 0 and not entry.task.done():
                self._forget(request.request_id, entry)
                entry.task.cancel()

    def forget_finished(self) -> None:
        """For new weights: a repeated request gets completions of theirs."""
        for key, entry in list(self._entries.items()):
            if entry.task.done():
                self._forget(key, entry)

    def _finished(self, request_id: str, entry: _Entry, task: asyncio.Task[RolloutOutput]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._forget(request_id, entry)
            return
        entry.tokens = sum(len(completion.token_ids) for completion in task.result().completions)
        self._tokens += entry.tokens
        while len(self._entries) > self._max_requests or self._tokens > self._max_tokens:
            oldest = next((key for key, old in self._entries.items() if old.task.done()), None)
            if oldest is None:
                return
            self._forget(oldest, self._entries[oldest])

    def _forget(self, request_id: str, entry: _Entry) -> None:
        if self._entries.get(request_id) is entry:
            del self._entries[request_id]
            self._tokens -= entry.tokens
