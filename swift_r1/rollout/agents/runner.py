"""Plays the episodes of agents: each has a session, a process and a deadline of its own. On rank 0."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from swift_r1.errors import RunFailed
from swift_r1.rollout.agents.gateway import AgentGateway
from swift_r1.rollout.agents.outcome import EndedEpisode, trajectory_of
from swift_r1.rollout.agents.processes import AgentProcesses, EpisodeExit, client_environment
from swift_r1.rollout.multi_turn import OpenConversation
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.wire import sessions as wire

_MOST_CALLS = 1000  # of an episode without --max_turns
_KILL_S = 120.0  # for what was killed to be gone
_NO_LATER_S = 0.02
_LOOK_S = 60.0
_SESSION = re.compile(wire.SESSION_ID)


@dataclass(frozen=True)
class AgentLimits:
    """Holds the limits of each episode. `seconds` do not count while it waits for the model."""

    seconds: float
    calls: int | None
    # whether `max_tokens` of the sampling holds for all calls together instead of for each
    total: bool
    needs_reward: bool = False  # whether an episode that gives no reward has failed
    whole_seconds: float | None = None  # since the start, after which the model is asked no more


class AgentRunner:
    """Leads conversations by agents, in the gateway's event loop; `at_once` run at the same time, of all rounds
    together."""

    def __init__(
        self, gateway: AgentGateway, processes: AgentProcesses, limits: AgentLimits, at_once: int
    ) -> None:
        self.gateway = gateway
        self.processes = processes
        self.limits = limits
        self.loop = gateway.loop
        self._free = asyncio.Semaphore(at_once)

    def check(self, busy: Sequence[OpenConversation]) -> float:
        """Finds nothing: each episode has its own deadline."""
        return time.monotonic() + _LOOK_S

    async def lead(self, conversation: OpenConversation) -> Trajectory:
        """Plays an episode to its end, however it ends."""
        async with self._free:
            conversation.begin()
            with self.gateway.session(conversation, self._session_of(conversation)) as state:
                state.routes = conversation.request.routes
                url = f"{self.gateway.url}/v1/sessions/{state.name}/v1"
                environ = client_environment(url, state.key, self.gateway.model.model_name)
                ended, late = await self._run(conversation, environ)
                episode = EndedEpisode(
                    conversation.request.request_id.rpartition("/")[0],
                    conversation.prompt,
                    ended,
                    late,
                    conversation.seconds(),
                    self.limits.seconds,
                    self.limits.needs_reward,
                )
                self.gateway.sessions.give_up(state, ended.given_up)
                return trajectory_of(episode, state, self.gateway.model.prompts)

    def _session_of(self, conversation: OpenConversation) -> wire.SessionRequest:
        request = conversation.request
        sampling = request.sampling
        return wire.SessionRequest(
            id=session_name(request.request_id),
            seed=request.seeds[0] if request.seeds else None,
            sampling=wire.SessionSampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                max_tokens=sampling.max_tokens,
            ),
            limits=wire.SessionLimits(
                calls=self.limits.calls or _MOST_CALLS,
                tokens=sampling.max_tokens if self.limits.total else None,
                seconds=self.limits.whole_seconds,
            ),
        )

    async def _run(
        self, conversation: OpenConversation, environ: dict[str, str]
    ) -> tuple[EpisodeExit, bool]:
        """Returns how the episode's process ended, and whether that was too late."""
        number, ended = await self.processes.begin(environ, row_of(conversation))
        late = True
        try:
            late = not await self._ends_in_time(conversation, ended)
        finally:
            if late:
                self.processes.kill(number)
        try:
            return await asyncio.wait_for(ended, _KILL_S if late else None), late
        except TimeoutError as error:
            raise RunFailed(
                f"an agent's process is still there {_KILL_S:g} s after it was killed"
            ) from error

    async def _ends_in_time(
        self, conversation: OpenConversation, ended: asyncio.Future[EpisodeExit]
    ) -> bool:
        while not ended.done():
            left = self.limits.seconds - conversation.seconds()
            if left <= 0:
                return False
            await asyncio.wait([ended], timeout=max(left, _NO_LATER_S))
        return True


def session_name(request_id: str) -> str:
    """Returns a session's id from a completion's, which no other has."""
    name = request_id.replace("/", ".")
    return (
        name if _SESSION.match(name) else blake2b(request_id.encode(), digest_size=16).hexdigest()
    )


def row_of(conversation: OpenConversation) -> dict[str, Any]:
    """Returns the row that the agent gets."""
    prompt = conversation.prompt
    request = conversation.request
    return {
        **prompt.columns,
        "messages": [dict(message) for message in prompt.messages],
        "prompt_id": prompt.prompt_id,
        "episode_id": request.request_id,
        "episode_seed": request.seeds[0] if request.seeds else None,
    }
