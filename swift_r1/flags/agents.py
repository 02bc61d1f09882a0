"""Flags of agents, programs that play whole episodes and know only an OpenAI address; and of environments that others
have written, which such an agent plays."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.flags.fields import Scope, check_no_key, flag, resumable_flag
from swift_r1.flags.rollout import MultiTurnArguments
from swift_r1.wire.urls import why_no_url, without_password

_AGENT = Scope(lambda args: args.plays_agent, "without --agent, --agent_command or --env")
_REWARDS_TURNS = Scope(
    lambda args: args.plays_agent or (args.scheduler_name is not None and not args.calls_tools),
    "without an agent, an environment or a scheduler that returns rewards of turns",
)


def _check_command(text: str) -> None:
    words = shlex.split(text)  # raises ValueError where a quotation does not end
    if not words:
        raise ValueError("is empty")
    for word, behind in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        check_no_key(
            {
                name.lstrip("-"): value or (behind if name.startswith("-") else ""),
                "an address": word,
            }
        )


def _check_env(spec: str) -> None:
    from swift_r1.plugins.environments.kinds import kind_faults

    if "://" in spec and (why := why_no_url(spec.partition(":")[2])) is not None:
        raise ValueError(f"{why}: {without_password(spec)!r}")
    faults = kind_faults(spec)
    if faults:
        raise UsageError(*faults)


@dataclass(frozen=True, kw_only=True)
class AgentArguments(MultiTurnArguments):
    """Agents."""

    agent: str | None = flag(
        None, "name of a registered agent that plays an episode per completion (docs/agents.md)"
    )
    agent_command: str | None = flag(
        None,
        "program that plays one episode per process, with OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL set, "
        "the same of ANTHROPIC_ too, and the row as JSON on standard input",
        check=_check_command,
        instead_of=("agent",),
    )
    agent_timeout: float = resumable_flag(
        300.0,
        "seconds before an episode is killed, not counting its waits for the model",
        _AGENT,
        more_than=0,
    )
    agent_concurrency: int = resumable_flag(
        64, "episodes at once, one process each", _AGENT, at_least=1
    )
    advantage_per: str = flag(
        "episode",
        "whether all of an episode has one advantage, or the rewards of turns that the agent or environment returns add "
        "to it turn by turn (docs/algorithms.md)",
        _REWARDS_TURNS,
        choices=("episode", "turn"),
    )

    @property
    def plays_agent(self) -> bool:
        return self.agent is not None or self.agent_command is not None

    @property
    def agent_words(self) -> list[str] | None:
        """`--agent_command` as the words of a command line."""
        return None if self.agent_command is None else shlex.split(self.agent_command)


@dataclass(frozen=True, kw_only=True)
class EnvironmentArguments(AgentArguments):
    """Environments."""

    env: str | None = flag(
        None,
        "play episodes of this environment, KIND:NAME, where KIND is gymnasium, harbor, openenv, trl or verifiers "
        "(docs/environments.md); its own rows are the data set env, which --dataset is then by default",
        check=_check_env,
        instead_of=("agent", "agent_command"),
    )
    env_args: dict[str, Any] = flag(
        {},
        "the environment's own arguments",
        Scope(lambda args: args.env is not None, "without --env"),
        check=check_no_key,
    )

    @property
    def plays_agent(self) -> bool:
        return self.env is not None or super().plays_agent

    @property
    def counts_by_turns(self) -> bool:
        """Whether the rewards of turns that are added to the advantage are all that the environment's reward is."""
        from swift_r1.plugins.environments.kinds import KINDS

        if self.advantage_per != "turn":
            return False
        return self.plays_gym or (
            self.env is not None and KINDS[self.env.partition(":")[0]].sums_turns
        )
