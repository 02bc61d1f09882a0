"""Flags of environments that others have written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.flags.agents import AgentArguments
from swift_r1.flags.fields import Scope, check_no_key, flag
from swift_r1.wire.urls import why_no_url, without_password


def _check(spec: str) -> None:
    from swift_r1.plugins.environments.kinds import kind_faults

    if "://" in spec and (why := why_no_url(spec.partition(":")[2])) is not None:
        raise ValueError(f"{why}: {without_password(spec)!r}")
    faults = kind_faults(spec)
    if faults:
        raise UsageError(*faults)


@dataclass(frozen=True, kw_only=True)
class EnvironmentArguments(AgentArguments):
    """Environments."""

    env: str | None = flag(
        None,
        "play episodes of this environment, KIND:NAME, where KIND is gymnasium, openenv, trl or verifiers "
        "(docs/environments.md); its own rows are the data set env, which --dataset is then by default",
        check=_check,
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

        by_turns = self.advantage_per == "turn" and self.env is not None
        return by_turns and KINDS[str(self.env).partition(":")[0]].sums_turns
