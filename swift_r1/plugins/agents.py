"""What plugins derive from and register for agents: programs that talk to the model by themselves, in episodes.

An agent gets an OpenAI client whose address belongs to its episode alone. Whatever it asks there is recorded as exact
tokens, and trained with the episode's reward (`swift_r1.rollout.agents`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

AgentResult = float | Mapping[str, Any] | None


class Agent(ABC):
    """One program for all episodes. Each episode runs in a process of its own, forked from one that has imported the
    plugin: it may block, crash or hang, and ends at `--agent_timeout`. It is made there, without arguments."""

    @abstractmethod
    async def run(self, client: AsyncOpenAI, row: dict[str, Any]) -> AgentResult:
        """Plays one episode.

        Args:
            client: any model name is answered; `max_retries` is set, so that a call outlives a weight update.
            row: the row's columns with `messages` (those of the prompt), `prompt_id` and `episode_id`.

        Returns:
            The episode's reward, for the reward function `agent_reward`; or a dict of plain values with `reward` and
            whatever else rewards are to see (`rollout_infos`), among them `turn_rewards` (a number per call of the
            model) for `--advantage_per turn`; or None, where only `--reward_funcs` judge.
        """


agents: dict[str, type[Agent]] = {}
"""Name for `--agent` -> class. Plugins write into it."""
