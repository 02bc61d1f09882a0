"""Plays the episodes of a round: each has a session, a process and a deadline of its own. On rank 0."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

from swift_r1.data.prompts import Prompt
from swift_r1.errors import RunFailed
from swift_r1.rollout.agents.gateway import AgentGateway
from swift_r1.rollout.agents.outcome import EndedEpisode, trajectory_of
from swift_r1.rollout.agents.processes import AgentProcesses, EpisodeExit
from swift_r1.rollout.base import OnDone
from swift_r1.rollout.calls import OpenCalls
from swift_r1.rollout.multi_turn import Asked, OnGroup, one_of
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.wire import sessions as wire
from swift_r1.wire.protocol import Completion, RolloutOutput, RolloutRequest

logger = logging.getLogger("swift_r1.rollout.agents")

_MOST_CALLS = 1000  # of an episode without --max_turns
_KILL_S = 120.0  # for what was killed to be gone
_NO_LATER_S = 0.02
_CAUSES = 5  # of failures, that are printed after a round
_QUOTED = re.compile(r"""'.*'|".*"|[0-9]+""")
_SESSION = re.compile(wire.SESSION_ID)


@dataclass(frozen=True)
class AgentLimits:
    """Holds the limits of each episode. `seconds` do not count while it waits for the model."""

    seconds: float
    calls: int | None
    total: bool  # whether `max_tokens` of the sampling holds for all calls together instead of for each
    needs_reward: bool = False  # whether an episode that gives no reward has failed


@dataclass(eq=False)
class _Episode:
    """One episode, in the gateway's loop."""

    place: int  # in the round
    prompt: Prompt
    request: RolloutRequest  # for one completion
    may_begin: asyncio.Future[None]
    busy: set[_Episode]  # those of the round that neither wait for the model nor are over
    ended: bool = False
    calls: int = 0  # of the model, under way
    since: float = 0.0  # when it began to do what it does: to wait for the model, or something else
    own: float = 0.0  # seconds that it did not wait

    def begin(self) -> None:
        self.busy.add(self)
        self.may_begin.set_result(None)

    def end(self) -> None:
        self.ended = True
        self.busy.discard(self)

    def called(self) -> None:
        if self.calls == 0:
            self._turn(True)
            self.busy.discard(self)
        self.calls += 1

    def answered(self) -> None:
        self.calls -= 1
        if self.calls == 0:
            self._turn(False)
            if not self.ended:
                self.busy.add(self)

    def _turn(self, waits: bool) -> None:
        now = time.monotonic()
        self.own += now - self.since if waits else 0.0
        self.since = now

    def seconds(self) -> float:
        """Its own so far."""
        return self.own + (0.0 if self.calls else time.monotonic() - self.since)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of the model that has no answer yet."""

    episode: _Episode
    request: RolloutRequest
    future: asyncio.Future[Completion]


def _place(call: _Call) -> tuple[int, Sequence[int], str]:
    """Among the calls of a round. The seed follows from what a call says, the number from when it came."""
    return call.episode.place, call.request.seeds or (), call.request.request_id


class Answerer(Protocol):
    """`ServerRollouts`, or the part of a pool that a prefetched round has."""

    def answer(self, calls: OpenCalls | None) -> None: ...


class AgentRunner:
    """Holds what all rounds share: the gateway, the processes, and how many episodes run at once."""

    def __init__(self, gateway: AgentGateway, processes: AgentProcesses, limits: AgentLimits, at_once: int) -> None:
        self.gateway = gateway
        self.processes = processes
        self.limits = limits
        self._free = at_once
        self._queue = deque[_Episode]()

    def enter(self, episodes: Sequence[_Episode]) -> None:
        self._queue.extend(episodes)
        self._fill()

    def leave(self) -> None:
        self._free += 1
        self._fill()

    def _fill(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            self._queue.popleft().begin()

    async def play(self, episode: _Episode) -> Trajectory:
        """Plays an episode to its end, however it ends."""
        request = episode.request
        sampling = episode.request.sampling
        model = self.gateway.model
        name = session_name(request.request_id)
        own = {field: getattr(sampling, field) for field in ("temperature", "top_p", "top_k", "min_p")}
        state = self.gateway.gateway.store.open(
            wire.SessionRequest(
                id=name,
                seed=request.seeds[0] if request.seeds else None,
                sampling=wire.SessionSampling(
                    **own, repetition_penalty=sampling.repetition_penalty, max_tokens=sampling.max_tokens
                ),
                limits=wire.SessionLimits(
                    calls=self.limits.calls or _MOST_CALLS, tokens=sampling.max_tokens if self.limits.total else None
                ),
            )
        )
        environ = {
            "OPENAI_BASE_URL": f"{self.gateway.url}/v1/sessions/{name}/v1",
            "OPENAI_API_KEY": state.key,
            "OPENAI_MODEL": model.model_name,
        }
        episode.since = time.monotonic()
        number, ended = await self.processes.begin(environ, row_of(episode))
        late = not await self._ends_in_time(episode, ended)
        if late:
            self.processes.kill(number)
        try:
            process_end = await asyncio.wait_for(ended, _KILL_S if late else None)
        except TimeoutError as error:
            raise RunFailed(f"an agent's process is still there {_KILL_S:g} s after it was killed") from error
        group = request.request_id.rpartition("/")[0]
        limits = self.limits
        play = EndedEpisode(
            group, episode.prompt, process_end, late, episode.seconds(), limits.seconds, limits.needs_reward
        )
        self.gateway.gateway.give_up(state, process_end.given_up)
        trajectory = trajectory_of(play, state, model.prompts)
        self.gateway.gateway.delete(name)
        return trajectory

    async def _ends_in_time(self, episode: _Episode, ended: asyncio.Future[EpisodeExit]) -> bool:
        while not ended.done():
            left = self.limits.seconds - episode.seconds()
            if left <= 0:
                return False
            await asyncio.wait([ended], timeout=max(left, _NO_LATER_S))
        return True


def session_name(request_id: str) -> str:
    """Returns a session's id from a completion's, which no other has."""
    name = request_id.replace("/", ".")
    return name if _SESSION.match(name) else blake2b(request_id.encode(), digest_size=16).hexdigest()


def row_of(episode: _Episode) -> dict[str, Any]:
    """Returns the row that the agent gets."""
    prompt = episode.prompt
    request = episode.request
    own: dict[str, Any] = {"messages": [dict(one) for one in prompt.messages], "prompt_id": prompt.prompt_id}
    seed = request.seeds[0] if request.seeds else None
    return {**prompt.columns, **own, "episode_id": request.request_id, "episode_seed": seed}


class Episodes:
    """The `Players` of agents. `on_call` is told of each call of the model, in the gateway's thread."""

    def __init__(self, runner: AgentRunner) -> None:
        self._runner = runner
        self._loop = runner.gateway.loop
        self._tasks: dict[_Episode, asyncio.Task[Trajectory]] = {}
        self._groups = 0  # not yet taken
        self._done = 0  # episodes
        self._done_groups: deque[list[asyncio.Task[Trajectory]]] = deque()
        self._waiting: dict[str, _Call] = {}
        self._busy: set[_Episode] = set()
        self._asked: list[str] = []
        self._changed = asyncio.Event()
        self._ended = 0
        self.on_call: Callable[[RolloutRequest], None] = lambda _request: None

    def begin(self, asked: Asked) -> None:
        """Starts the episodes of all requests."""
        self._runner.gateway.call(self._begin(asked)).result()

    def asked(self, on_done: OnDone) -> list[RolloutRequest]:
        """Returns the calls of the model that episodes wait for, once all wait or have ended; none when all have."""
        waiting = self._runner.gateway.call(self._settled()).result()
        self.tell(on_done)
        return waiting

    def answer(self, completions: Sequence[Completion]) -> None:
        """Answers the calls of `asked`, in their order."""
        for name, completion in zip(self._asked, completions, strict=True):
            self._loop.call_soon_threadsafe(self._give, name, completion)

    def resolve(self, output: RolloutOutput) -> None:
        """The answer to one call."""
        self._loop.call_soon_threadsafe(self._give, output.request_id, output.completions[0])

    def tell(self, on_done: OnDone) -> None:
        """How many more have ended."""
        ended = self._done
        if ended != self._ended:
            on_done(ended - self._ended)
        self._ended = ended

    @property
    def over(self) -> bool:
        return self._ended == len(self._tasks)

    def take_ended(self) -> list[list[Trajectory]]:
        """Returns the groups whose episodes have all ended since the last call."""
        found = []
        while self._done_groups:
            found.append([task.result() for task in self._done_groups.popleft()])
        self._groups -= len(found)
        if found and not self._groups:
            self._report()
        return found

    def _report(self) -> None:
        """One line for each cause of failure, the most frequent ones. Results that differ have one cause."""
        failures = [failure for task in self._tasks.values() if (failure := task.result().failure) is not None]
        causes = Counter(map(_cause, failures))
        for cause, count in causes.most_common(_CAUSES):
            alike = Counter(failure for failure in failures if _cause(failure) == cause)
            example = ", for example" if len(alike) > 1 else ""
            logger.warning(
                "%d of %d episodes have no reward%s: %s", count, len(self._tasks), example, next(iter(alike))
            )
        more = len(causes) - _CAUSES
        if more > 0:
            logger.warning("%d more causes are in completions.jsonl (failure)", more)

    # In the gateway's loop

    async def _begin(self, asked: Asked) -> None:
        self._ended = 0
        self._done = 0
        self._tasks = {}
        self._busy = set()
        self._groups = len(asked)
        for prompt, request in asked:
            group: list[asyncio.Task[Trajectory]] = []
            left = Counter(episodes=request.n)
            for index in range(request.n):
                may_begin = self._loop.create_future()
                episode = _Episode(len(self._tasks), prompt, one_of(request, index), may_begin, self._busy)
                task = self._loop.create_task(self._play(episode))
                self._tasks[episode] = task
                task.add_done_callback(partial(self._over_with, episode, group, left))
                group.append(task)
        self._runner.enter(list(self._tasks))

    def _over_with(
        self,
        episode: _Episode,
        group: list[asyncio.Task[Trajectory]],
        left: Counter[str],
        _task: asyncio.Task[Trajectory],
    ) -> None:
        """An episode of this group has ended; `left` counts the others."""
        episode.end()
        left["episodes"] -= 1
        if not left["episodes"]:
            self._done_groups.append(group)
        self._done += 1  # at last: who sees that all are over takes all groups
        self._changed.set()

    async def _play(self, episode: _Episode) -> Trajectory:
        await episode.may_begin
        asks = self._runner.gateway.model.asks
        name = session_name(episode.request.request_id)

        def ask(request: RolloutRequest) -> asyncio.Future[Completion]:
            future = self._loop.create_future()
            episode.called()
            self._waiting[request.request_id] = _Call(episode, request, future)
            future.add_done_callback(lambda _future: self._over(request.request_id))  # the agent may hang up
            self._changed.set()
            self.on_call(request)
            return future

        asks[name] = ask
        try:
            return await self._runner.play(episode)
        finally:
            del asks[name]
            self._runner.leave()

    async def _settled(self) -> list[RolloutRequest]:
        while self._busy:
            self._changed.clear()
            await self._changed.wait()
        # The order in which they came must not matter.
        waiting = sorted(self._waiting.values(), key=_place)
        requests = [call.request for call in waiting]
        self._asked = [request.request_id for request in requests]
        return requests

    def _give(self, name: str, completion: Completion) -> None:
        """The answer to a call, whose agent may be gone."""
        call = self._over(name)
        if call is not None and not call.future.done():
            call.future.set_result(completion)

    def _over(self, name: str) -> _Call | None:
        call = self._waiting.pop(name, None)
        if call is not None:
            call.episode.answered()
        return call


def _cause(failure: str) -> str:
    """Without the result itself, of which each episode may have another."""
    return _QUOTED.sub("", failure) if failure.startswith("result:") else failure


class ServedEpisodes:
    """The `Turns` of agents over rollout servers: each call is asked as it comes, and answered as soon as it can be.
    `episodes` are on rank 0."""

    def __init__(self, rollouts: Answerer, episodes: Episodes | None) -> None:
        self.rollouts = rollouts
        self.episodes = episodes

    def generate(self, asked: Asked | None, on_done: OnDone, on_group: OnGroup) -> None:
        episodes = self.episodes
        if episodes is None:
            self.rollouts.answer(None)
            return
        assert asked is not None

        def look() -> None:
            episodes.tell(on_done)
            for group in episodes.take_ended():
                on_group(group)
            if episodes.over:
                calls.close()

        def answered(output: RolloutOutput) -> None:
            on_done(0)
            episodes.resolve(output)

        calls = OpenCalls(answered, look)
        episodes.on_call = calls.put
        episodes.begin(asked)
        self.rollouts.answer(calls)
