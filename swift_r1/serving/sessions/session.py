"""One session: its calls, counts and limits. Nothing here waits, and nothing knows HTTP.

A call that continues an earlier one keeps that one's tokens: its prompt is they, and what the chat template puts behind
the model's turn. So each call holds only the tokens that it adds, and sequences are chains of calls.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from swift_r1.serving.sessions.calls import CallContent, ChatRenderer, ModelCall
from swift_r1.serving.sessions.history import Message, canonical, digest
from swift_r1.serving.sessions.lineage import Lineage
from swift_r1.serving.sessions.tokens import ExactTokens
from swift_r1.wire import sessions as wire
from swift_r1.wire.protocol import (
    FinishReason,
    HTTPError,
    Limit,
    LimitReached,
    Routes,
    RoutesAsked,
    completion_seed,
    versions_of_tokens,
)
from swift_r1.wire.routes import unpacked

_BYTES_PER_TOKEN = 16  # an id, a log-prob and about four letters
_BYTES_PER_MESSAGE = 300  # beside its text
_BYTES_PER_CALL = 3000
_OWED = 256  # so many contents of calls without an answer are known


class SessionState:
    """Calls and counts of one session. `request` is what it was opened with, except the id."""

    def __init__(
        self,
        name: str,
        request: wire.SessionRequest,
        key: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.request = request
        self.key = key
        self.began = self.used = clock()
        self.lineage = Lineage()
        self.retried = self.failed = self.bytes = 0
        self.tokens = 0  # of all answers
        self.limit: Limit | None = None  # the first one that has kept a call from its answer
        self.routes: RoutesAsked | None = None  # that every call asks the engine for
        self.on_growth: Callable[[int], None] = lambda _bytes: None
        self.beginning = asyncio.Lock()  # held while a call begins
        self._clock = clock
        self._numbers = 0
        self._by_digest: dict[bytes, dict[int, ModelCall]] = {}
        self._by_key: dict[str, ModelCall] = {}
        # calls without an answer: a retry of theirs is a call
        self._owed: Counter[bytes] = Counter()

    @property
    def calls(self) -> list[ModelCall]:
        """Answered ones."""
        return self.lineage.calls

    @property
    def running(self) -> list[ModelCall]:
        return self.lineage.running

    def left(self) -> tuple[int | None, float | None]:
        """Returns the tokens and seconds that are left. Raises LimitReached (403) where the session lets no call in."""
        limits = self.request.limits
        seconds = None if limits.seconds is None else self.began + limits.seconds - self._clock()
        tokens = None if limits.tokens is None else limits.tokens - self.tokens
        if seconds is not None and seconds <= 0:
            raise LimitReached(403, f"the session's {limits.seconds:g} s are over", "seconds")
        if tokens is not None and tokens <= 0:
            raise LimitReached(403, f"the session's {limits.tokens} tokens are used up", "tokens")
        if limits.calls is not None and len(self.calls) + len(self.running) >= limits.calls:
            raise LimitReached(403, f"the session's {limits.calls} calls are used up", "calls")
        return tokens, seconds

    def retry_of(self, digest: bytes, retried: bool, key: str | None = None) -> ModelCall | None:
        """The call that this one repeats, where the client says that it tries again (`retried`), or sends an
        idempotency key for the second time. For the former that is the newest call with this content that was not
        continued, unless a call with it has failed, which is what the client tries again. Raises HTTPError (400) for
        a key that was used for another call."""
        known = self._by_key.get(key) if key is not None else None
        if known is not None and known.digest != digest:
            raise HTTPError(400, "this Idempotency-Key was used for another call of the session")
        if known is None and retried and key is None:
            if digest in self._owed:
                self._owed -= Counter([digest])
                return None
            same = reversed(self._by_digest.get(digest, {}).values())
            known = next((call for call in same if not call.children), None)
        if known is not None:
            self.retried += 1
            self.used = self._clock()
        return known

    def called(self, key: str) -> ModelCall | None:
        """The call that came with this idempotency key."""
        return self._by_key.get(key)

    def begin(
        self, content: CallContent, renderer: ChatRenderer, key: str | None = None, before: int = 0
    ) -> tuple[ModelCall, list[int]]:
        """A new call and its prompt; `before` as the client says (`Attempt`). Raises HTTPError as `left`, and what the
        renderer raises."""
        self.left()
        same = self._by_digest.get(content.digest, {})
        repetition = next(
            number for number in range(before, before + len(same) + 1) if number not in same
        )
        place = self.lineage.place(content, renderer)
        seed = self.request.seed
        call = ModelCall(
            number=self._numbers,
            kind=place.kind,
            parent=place.parent,
            depth=0 if place.parent is None else place.parent.depth + 1,
            digest=content.digest,
            repetition=repetition,
            seed=None if seed is None else completion_seed(seed, content.digest.hex(), repetition),
            content=content,
            head=place.head,
            added=array("i", place.added),
            prompt_tokens=0,
            began=self._clock(),
        )
        prompt = call.tokens()
        call.prompt_tokens = len(prompt)
        self._numbers += 1
        self.running.append(call)
        self._by_digest.setdefault(call.digest, {})[repetition] = call
        if key is not None:
            self._by_key[key] = call
        if call.parent is not None:
            call.parent.children += 1
        self.used = self._clock()
        return call, prompt

    def count(self, content: CallContent, renderer: ChatRenderer) -> int:
        """Returns how many tokens the prompt of such a call would have. Raises what the renderer raises."""
        place = self.lineage.place(content, renderer)
        before = 0 if place.parent is None else len(place.parent.tokens())
        return before + len(place.added)

    def finish(
        self,
        call: ModelCall,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[tuple[int, int]],
        finish_reason: FinishReason,
        text: str,
        answer: Message,
        routes: Routes | None = None,
    ) -> None:
        """The call's answer; `answer` is the message as the client gets it."""
        call.token_ids = array("i", token_ids)
        call.logprobs = array("d", logprobs)
        call.versions = tuple(versions)
        call.routes = routes
        call.finish_reason = finish_reason
        call.text = text
        call.answer = answer
        self.tokens += len(call.token_ids)
        self.used = self._clock()
        call.seconds = self.used - call.began
        content = call.content
        call.place = len(content.messages)
        call.head = digest(call.head, content.answer_key(answer))
        call.held = len(canonical([content.messages, content.tools, answer]))
        call.held += _BYTES_PER_MESSAGE * (len(content.messages) + 1)
        self._grow(_size(call))
        before = None if call.parent is None else call.parent.parent
        if before is not None and before.content.messages:
            # What it said is part of the parent's messages, and the parent stays: its answer was read.
            self._grow(-before.held)
            before.content = CallContent()
            before.answer = None
            before.held = 0
        self.lineage.answered(call)

    def _grow(self, size: int) -> None:
        self.bytes += size
        self.on_growth(size)

    def fail(self, call: ModelCall) -> None:
        """The call has no answer, or its client has given it up: it leaves no trace but in the counts."""
        self.lineage.failed(call)
        if call.finish_reason is not None:
            self._grow(-_size(call))
            self.tokens -= len(call.token_ids)
        same = self._by_digest[call.digest]
        del same[call.repetition]
        if not same:
            del self._by_digest[call.digest]
        self._by_key = {key: one for key, one in self._by_key.items() if one is not call}
        if call.parent is not None:
            call.parent.children -= 1
        self.refused(call.digest)

    def refused(self, digest: bytes) -> None:
        """A call was not even begun."""
        self.failed += 1
        if len(self._owed) < _OWED or digest in self._owed:
            self._owed[digest] += 1
        self.used = self._clock()

    def routes_of(self, number: int) -> np.ndarray | None:
        """Returns the experts of the tokens of a call and of those before it, without the last, each as the engine chose
        them when it first read the token, `[tokens, layers, k]`; None where the session asks for none. Raises RunFailed
        where an engine's are not those of its tokens."""
        asked = self.routes
        if asked is None:
            return None
        line = next(call for call in self.calls if call.number == number).line()
        whole: np.ndarray = np.concatenate(
            [
                unpacked(
                    call.routes,
                    asked,
                    call.read_after - call.read_before,
                    f"{self.name}/{call.number}",
                )
                for call in line
            ]
        )
        return whole

    def record(self) -> wire.SessionRecord:
        calls, sequences = recorded(self.calls, self.request.seed is not None)
        return wire.SessionRecord(
            id=self.name,
            seed=self.request.seed,
            running=len(self.running),
            tokens=self.tokens,
            seconds=self._clock() - self.began,
            kinds=Counter(call.kind for call in self.calls),
            retried=self.retried,
            failed=self.failed,
            calls=tuple(calls),
            sequences=tuple(sequences),
        )


def recorded(
    calls: Sequence[ModelCall], seeded: bool
) -> tuple[list[wire.RecordedCall], list[wire.RecordedSequence]]:
    """Returns the answered calls and their sequences: each token that the model wrote is in one of these. `seeded`
    where the order in which they came must not matter."""
    chains = _chains(calls, seeded)
    place = {call: number for number, chain in enumerate(chains) for call in chain}
    return [_call(call, place[call]) for call in calls], [_sequence(chain) for chain in chains]


def _chains(calls: Sequence[ModelCall], seeded: bool) -> list[list[ModelCall]]:
    """A call is continued by the first that extends it; in a session with a seed by the one with the smallest
    content."""
    continued: dict[ModelCall, ModelCall] = {}
    order = calls
    if seeded:
        order = sorted(order, key=lambda call: (call.depth, call.digest, call.repetition))
    for call in order:
        if call.parent is not None:
            continued.setdefault(call.parent, call)
    chains = []
    for call in order:
        if call.parent is None or continued[call.parent] is not call:
            chain = [call]
            while (following := continued.get(chain[-1])) is not None:
                chain.append(following)
            chains.append(chain)
    return chains


def _call(call: ModelCall, sequence: int) -> wire.RecordedCall:
    assert call.finish_reason is not None and call.sampling is not None
    assert call.place is not None
    return wire.RecordedCall(
        number=call.number,
        completion_id=call.completion_id,
        kind=call.kind,
        parent=None if call.parent is None else call.parent.number,
        sequence=sequence,
        prompt_tokens=call.prompt_tokens,
        place=call.place,
        completion_tokens=len(call.token_ids),
        finish_reason=call.finish_reason,
        weight_versions=call.versions,
        seed=call.seed,
        sampling=call.sampling.model_copy(update={"structural_tag": None}),
        constrained=call.sampling.structural_tag is not None,
        seconds=round(call.seconds, 3),
    )


def _sequence(chain: Sequence[ModelCall]) -> wire.RecordedSequence:
    first = chain[0]
    last = chain[-1]
    assert last.finish_reason is not None and last.answer is not None
    tokens = ExactTokens(first.tokens()[: first.prompt_tokens])
    for call in chain:
        if call is not first:
            tokens.read(call.added)
        tokens.write(
            call.token_ids, call.logprobs, versions_of_tokens(call.versions, len(call.token_ids))
        )
    return wire.RecordedSequence(
        calls=tuple(call.number for call in chain),
        prompt_token_ids=tokens.prompt_token_ids,
        token_ids=tuple(tokens.token_ids),
        loss_mask=tuple(tokens.loss_mask),
        logprobs=tuple(tokens.logprobs),
        versions=tuple(tokens.versions),
        finish_reason=last.finish_reason,
        messages=(*map(dict, last.content.messages), dict(last.answer)),
        tools=tuple(map(dict, last.content.tools)),
    )


def _size(call: ModelCall) -> int:
    """Bytes of an answered call."""
    tokens = len(call.added) + len(call.token_ids)
    return (
        _BYTES_PER_CALL
        + call.held
        + _BYTES_PER_TOKEN * tokens
        + (len(call.routes.data) if call.routes is not None else 0)
    )
