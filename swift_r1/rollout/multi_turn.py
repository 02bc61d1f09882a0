"""Leads conversations with the model for the loop: of one turn, or of several that schedulers or agents decide on."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from swift_r1.data.images import ImageFile
from swift_r1.data.prompts import Prompt
from swift_r1.rollout.base import Generator, GroupRequest, OnDone, ignore_output
from swift_r1.rollout.calls import OpenCalls
from swift_r1.rollout.trajectory import TokenSequence, Trajectory
from swift_r1.rollout.transcript import Transcript
from swift_r1.runtime.ranks import Ranks
from swift_r1.wire.protocol import Completion, RolloutOutput, RolloutRequest
from swift_r1.wire.routes import routes_of

_CAUSES = 5  # of failures, that are printed after a round
_QUOTED = re.compile(r"""'.*'|".*"|[0-9]+""")

GroupRequests = Sequence[GroupRequest]
# given the trajectories of a prompt, on rank 0; must not wait
OnGroup = Callable[[Sequence[Trajectory]], None]


class Turns(Protocol):
    """Answers the loop's and the evaluation's prompts with conversations."""

    def generate(self, asked: GroupRequests | None, on_done: OnDone, on_group: OnGroup) -> None:
        """Gives all conversations of each prompt to `on_group` as soon as they have ended. Collective; the other ranks
        pass None."""


Decode = Callable[[Sequence[int]], str]


class SingleTurn:
    """Takes what the engine answers as the conversation."""

    def __init__(self, rollouts: Generator, decode: Decode) -> None:
        self.rollouts = rollouts
        self.decode = decode

    def generate(self, asked: GroupRequests | None, on_done: OnDone, on_group: OnGroup) -> None:
        by_id = {one.request.request_id: one for one in asked or ()}

        def answered(output: RolloutOutput) -> None:
            on_group(_single_turns(by_id[output.request_id], output, self.decode))

        requests = None if asked is None else [one.request for one in asked]
        images = _images_of(one.prompt for one in by_id.values())
        self.rollouts.generate(requests, on_done, answered, images)


def _images_of(prompts: Iterable[Prompt]) -> dict[str, ImageFile]:
    return {image.sha256: image for prompt in prompts for image in prompt.images}


def _single_turns(asked: GroupRequest, output: RolloutOutput, decode: Decode) -> list[Trajectory]:
    """Returns the conversations of one turn that a prompt's completions are."""
    return [_single_turn(asked, one, decode) for one in output.completions]


def _single_turn(asked: GroupRequest, completion: Completion, decode: Decode) -> Trajectory:
    prompt, request = asked
    ids = completion.token_ids
    text = prompt.response_prefix + decode(ids)
    messages = [*map(dict, prompt.messages), {"role": "assistant", "content": text}]
    whole = TokenSequence.of_completion(prompt, completion, routes_of(completion, request))
    return Trajectory(
        request.request_id, prompt, (whole,), (ids,), messages, text, completion.finish_reason
    )


@dataclass(eq=False)
class OpenConversation:
    """A conversation under way, in the thread of its event loop. It is busy from `begin` on but while it waits for the
    model.

    Attributes:
        place: its number among those that were begun together.
        prompt: the row's; a scheduler may begin with another one.
        request: for its one completion, which says how turns are sampled.
        transcript: the tokens of a scheduler's conversation, from its first turn on.
        calls: turns of the model that were asked for and have no answer yet.
        began: when it began, by the monotonic clock.
        since: when it began to be busy or to wait, by the same.
    """

    place: int
    prompt: Prompt
    request: RolloutRequest
    owner: ConversationLoop
    transcript: Transcript | None = None
    calls: int = 0
    began: float = 0.0
    since: float = 0.0
    _busy_before: float = 0.0  # seconds

    def begin(self) -> None:
        self.since = self.began = time.monotonic()
        self.owner.busy[self] = None

    def ask(self, request: RolloutRequest) -> asyncio.Future[Completion]:
        """Asks for a turn of the model. Who no longer wants it cancels the future."""
        if self.calls == 0:
            now = time.monotonic()
            self._busy_before += now - self.since
            self.since = now
            self.owner.busy.pop(self, None)
        self.calls += 1
        return self.owner.ask(self, request)

    def answered(self, over: bool) -> None:
        """Notes that a turn is there, or is no longer wanted; a conversation that is `over` is busy no more."""
        self.calls -= 1
        if self.calls == 0:
            self.since = time.monotonic()
            if not over:
                self.owner.busy[self] = None

    def seconds(self) -> float:
        """Returns how long it was busy so far."""
        return self._busy_before + (0.0 if self.calls else time.monotonic() - self.since)


class EpisodeRunner(Protocol):
    """Leads conversations of several turns, on rank 0, in an event loop of another thread."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    async def lead(self, conversation: OpenConversation) -> Trajectory:
        """Begins a conversation, and returns it at its end. What it raises ends the run."""

    def check(self, busy: Sequence[OpenConversation]) -> float:
        """Looks for a conversation that hangs among the busy ones, which are in the order in which they became so.
        Returns when to look again, by the monotonic clock. Called in the thread that waits. Raises RunFailed."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """A turn of the model that has no answer yet."""

    conversation: OpenConversation
    request: RolloutRequest
    future: asyncio.Future[Completion]

    def place(self) -> tuple[int, Sequence[int], str]:
        """Returns its place among the calls that are generated together. The seed follows from what a call says, the
        number at the end of the id from when it came."""
        return self.conversation.place, self.request.seeds or (), self.request.request_id


@dataclass(eq=False, slots=True)
class _Group:
    """The conversations of a prompt."""

    tasks: list[asyncio.Task[Trajectory]] = field(default_factory=list)
    ended: int = 0


class ConversationLoop:
    """Runs the conversations of one `generate`, each a task of the runner's event loop. With `calls` each turn of the
    model is put there as it is asked for. `busy` has the conversation first that is so for longest."""

    def __init__(
        self, runner: EpisodeRunner, asked: GroupRequests, calls: OpenCalls | None = None
    ) -> None:
        self.busy: dict[OpenConversation, None] = {}
        self._runner = runner
        self._calls = calls
        self._waiting: dict[str, _Call] = {}
        self._tasks: list[asyncio.Task[Trajectory]] = []
        self._changed = asyncio.Event()
        self._count = sum(request.n for _, request in asked)
        self._ended = 0
        self._told = 0  # of those that have ended
        self._ended_groups: deque[list[Trajectory]] = deque()
        self._fault: BaseException | None = None
        self._look_at = 0.0
        runner.loop.call_soon_threadsafe(self._start, asked)

    # In the thread that waits for the conversations

    def settled(self) -> list[RolloutRequest]:
        """Returns the turns that conversations wait for, once all wait or have ended; none when all have. Raises as
        `hand_on`."""
        settled = asyncio.run_coroutine_threadsafe(self._settled(), self._runner.loop)
        while not settled.done():
            self._check()
            wait([settled], self._look_at - time.monotonic())
        self._check()
        return settled.result()

    def answer(self, outputs: Sequence[RolloutOutput]) -> None:
        """Continues the conversations that wait for these turns."""
        self._runner.loop.call_soon_threadsafe(self._answer, outputs)

    def hand_on(self, on_done: OnDone, on_group: OnGroup) -> bool:
        """Gives away the groups that have ended since the last call, and returns whether all have. Raises what a
        conversation raised, and RunFailed where one hangs."""
        self._check()
        ended = self._ended
        if ended != self._told:
            on_done(ended - self._told)
        self._told = ended
        while self._ended_groups:
            on_group(self._ended_groups.popleft())
        return ended == self._count

    def end(self) -> None:
        """Ends what still runs, soon; says why conversations failed where none does."""
        if self._ended < self._count:
            self._runner.loop.call_soon_threadsafe(self._cancel)
        elif self._fault is None:
            _report_failures([task.result().failure for task in self._tasks])

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault
        if time.monotonic() >= self._look_at:
            # a copy: the other thread changes it
            self._look_at = self._runner.check(list(self.busy))

    # In the event loop's thread

    def ask(
        self, conversation: OpenConversation, request: RolloutRequest
    ) -> asyncio.Future[Completion]:
        future = self._runner.loop.create_future()
        self._waiting[request.request_id] = _Call(conversation, request, future)
        # it may be cancelled
        future.add_done_callback(lambda _future: self._take(request.request_id))
        self._changed.set()
        if self._calls is not None:
            self._calls.put(request)
        return future

    def _start(self, asked: GroupRequests) -> None:
        for prompt, request in asked:
            group = _Group()
            for index in range(request.n):
                conversation = OpenConversation(
                    len(self._tasks), prompt, _one_of(request, index), self
                )
                task = self._runner.loop.create_task(self._runner.lead(conversation))
                task.add_done_callback(partial(self._over, conversation, group))
                group.tasks.append(task)
                self._tasks.append(task)

    def _over(
        self, conversation: OpenConversation, group: _Group, task: asyncio.Task[Trajectory]
    ) -> None:
        self.busy.pop(conversation, None)
        fault = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._fault = self._fault or fault
        group.ended += 1
        if self._fault is None and group.ended == len(group.tasks):
            self._ended_groups.append([one.result() for one in group.tasks])
        self._ended += 1  # at last: who sees that all are over takes all groups
        self._changed.set()
        if self._calls is not None:
            self._calls.wake()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _settled(self) -> list[RolloutRequest]:
        while self.busy and self._fault is None:
            self._changed.clear()
            await self._changed.wait()
        # The order in which they came must not matter.
        waiting = sorted(self._waiting.values(), key=_Call.place)
        return [call.request for call in waiting]

    def _answer(self, outputs: Sequence[RolloutOutput]) -> None:
        # All are busy before any goes on: one that hangs stops the event loop for all of them.
        for output in outputs:
            call = self._take(output.request_id)
            if call is not None and not call.future.done():
                call.future.set_result(output.completions[0])

    def _take(self, name: str) -> _Call | None:
        """Returns a call that waits no more; None where its conversation has given it up before."""
        call = self._waiting.pop(name, None)
        if call is not None:
            call.conversation.answered(over=self._tasks[call.conversation.place].done())
        return call


Runners = Mapping[str, EpisodeRunner]
"""By task, on rank 0."""


class _TaskLoops:
    """The conversations of one `generate`: a loop for each runner leads those of its task; those of a task without one
    have one turn. With `calls` each turn of the model is put there."""

    def __init__(
        self, runners: Runners, decode: Decode, asked: GroupRequests, calls: OpenCalls | None = None
    ) -> None:
        of_tasks: dict[str, list[GroupRequest]] = {}
        for prompt, request in asked:
            of_tasks.setdefault(prompt.task, []).append(GroupRequest(prompt, request))
        self._loops = [
            ConversationLoop(runners[task], own, calls)
            for task, own in of_tasks.items()
            if task in runners
        ]
        self._decode = decode
        # without an answer, by request id
        self._single = {
            one.request.request_id: one
            for task, own in of_tasks.items()
            for one in own
            if task not in runners
        }
        self._ended: list[list[Trajectory]] = []
        if calls is not None:
            for one in self._single.values():
                calls.put(one.request)

    @property
    def images(self) -> dict[str, ImageFile]:
        """Returns the images of the prompts that wait for their only turn."""
        return _images_of(one.prompt for one in self._single.values())

    def settled(self) -> list[RolloutRequest]:
        """Returns the turns to ask for. Waits and raises as `ConversationLoop.settled`."""
        waiting = [one.request for one in self._single.values()]
        return waiting + [request for loop in self._loops for request in loop.settled()]

    def answer(self, outputs: Sequence[RolloutOutput]) -> None:
        """Continues the conversations that wait for these turns."""
        for output in outputs:
            one = self._single.pop(output.request_id, None)
            if one is not None:
                self._ended.append(_single_turns(one, output, self._decode))
        for loop in self._loops:
            loop.answer(outputs)

    def hand_on(self, on_done: OnDone, on_group: OnGroup) -> bool:
        """Returns and raises as `ConversationLoop.hand_on`."""
        ended = self._ended
        self._ended = []
        for group in ended:
            on_done(len(group))
            on_group(group)
        led = [loop.hand_on(on_done, on_group) for loop in self._loops]
        return all(led) and not self._single

    def end(self) -> None:
        for loop in self._loops:
            loop.end()


class BatchedTurns:
    """Generates the turns of all conversations in one call of the engine, on all ranks, once each conversation waits
    for one or has ended. So batches, and with seeds the tokens, do not depend on how long a scheduler or an agent
    takes. `runners` are None on other ranks than 0."""

    def __init__(
        self, rollouts: Generator, ranks: Ranks, runners: Runners | None, decode: Decode
    ) -> None:
        self.rollouts = rollouts
        self.ranks = ranks
        self.runners = runners
        self.decode = decode

    def generate(self, asked: GroupRequests | None, on_done: OnDone, on_group: OnGroup) -> None:
        if self.runners is None:
            while self._count(None):
                self.rollouts.generate(None, on_done, ignore_output)
            return
        assert asked is not None
        conversations = _TaskLoops(self.runners, self.decode, asked)
        try:
            while True:
                with self.ranks.busy():
                    requests = conversations.settled()
                conversations.hand_on(on_done, on_group)
                if not self._count(requests):
                    return
                outputs = self.rollouts.generate(
                    requests, lambda _count: None, ignore_output, conversations.images
                )
                assert outputs is not None
                on_done(0)
                conversations.answer(outputs)
        finally:
            conversations.end()

    def _count(self, requests: Sequence[RolloutRequest] | None) -> int:
        """Returns how many turns rank 0 asks for, on every rank."""
        return int(
            self.ranks.broadcast(None if requests is None else [torch.tensor([len(requests)])])[0]
        )


class Answerer(Protocol):
    """Rollout servers, or the part of a pool that a prefetched round has."""

    def answer(self, calls: OpenCalls | None) -> None:
        """Answers each call as it comes, until they are closed. Collective; the other ranks pass None."""


class ServedTurns:
    """Asks rollout servers for each turn as it comes: a conversation goes on as soon as its own turn is there, however
    long others take. `runners` are None on other ranks than 0."""

    def __init__(self, rollouts: Answerer, runners: Runners | None, decode: Decode) -> None:
        self.rollouts = rollouts
        self.runners = runners
        self.decode = decode

    def generate(self, asked: GroupRequests | None, on_done: OnDone, on_group: OnGroup) -> None:
        if self.runners is None:
            self.rollouts.answer(None)
            return
        assert asked is not None

        def look() -> None:
            if conversations.hand_on(on_done, on_group):
                calls.close()

        def answered(output: RolloutOutput) -> None:
            on_done(0)
            conversations.answer([output])

        calls = OpenCalls(answered, look, images=_images_of(prompt for prompt, _ in asked))
        conversations = _TaskLoops(self.runners, self.decode, asked, calls)
        try:
            self.rollouts.answer(calls)
        finally:
            conversations.end()


def _one_of(request: RolloutRequest, index: int) -> RolloutRequest:
    """Returns the request for one of its completions."""
    seeds = request.seeds and request.seeds[index : index + 1]
    return request.model_copy(
        update={"request_id": f"{request.request_id}/{index}", "n": 1, "seeds": seeds}
    )


def _report_failures(outcomes: Sequence[str | None]) -> None:
    """Logs one line for each cause of failure, the most frequent ones. Results that differ have one cause."""
    logger = logging.getLogger("swift_r1.rollout.agents")
    failures = [failure for failure in outcomes if failure is not None]
    causes = Counter(map(_cause, failures))
    for cause, count in causes.most_common(_CAUSES):
        alike = Counter(failure for failure in failures if _cause(failure) == cause)
        example = ", for example" if len(alike) > 1 else ""
        logger.warning(
            "%d of %d episodes have no reward%s: %s",
            count,
            len(outcomes),
            example,
            next(iter(alike)),
        )
    more = len(causes) - _CAUSES
    if more > 0:
        logger.warning("%d more causes are in completions.jsonl (failure)", more)


def _cause(failure: str) -> str:
    """Returns a failure without the result itself, of which each episode may have another."""
    return _QUOTED.sub("", failure) if failure.startswith("result:") else failure
