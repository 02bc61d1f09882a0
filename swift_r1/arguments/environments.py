"""Flags of environments that others have written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift_r1.arguments.fields import Scope, flag
from swift_r1.errors import UsageError


def _check(spec: str) -> None:
    from swift_r1.agents.environments.kinds import kind_faults

    if faults := kind_faults(spec):
        raise UsageError(*faults)


@dataclass(frozen=True, kw_only=True)
class EnvironmentArguments:
    """Environments."""

    env: str | None = flag(
        None,
        "play episodes of this environment, KIND:NAME; kinds are gymnasium, openenv, trl and verifiers "
        "(docs/environments.md). Its own rows are the data set env, the default of --dataset then",
        check=_check,
    )
    env_args: dict[str, Any] = flag(
        {}, "the environment's own arguments", Scope(lambda args: args.env is not None, "without --env")
    )
