"""What `swift check --agent` and `--agent_command` show: one episode, with a script in the model's place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift_r1.data.preprocessors import Row
from swift_r1.data.prompts import Prompt
from swift_r1.flags.rlhf import CheckArguments
from swift_r1.launch.checks.environments import cut, messages_table
from swift_r1.launch.checks.script import ScriptedPolicy, letters
from swift_r1.plugins.environments.scripted import MOST_TURNS, ScriptedModel
from swift_r1.rollout.agents.gateway import AgentGateway
from swift_r1.rollout.agents.outcome import EndedEpisode, outcome_of
from swift_r1.rollout.agents.parent import Order
from swift_r1.rollout.agents.processes import AgentProcesses, EpisodeExit, client_environment
from swift_r1.wire.sessions import SessionLimits, SessionRecord, SessionRequest

if TYPE_CHECKING:
    from rich.console import Console

_EPISODE_S = 60.0
_KILL_S = 30.0


@dataclass(frozen=True, slots=True)
class AgentReport:
    """One episode that was played.

    Attributes:
        said: what answered in the model's place.
        failure: why it would have failed in a run.
        result: what the agent returned, `reward` included.
        calls: of the model.
        kinds: how many calls are of each kind (docs/agents.md).
        rows: sequences that would be trained.
        messages: of the last call, and the answer.
    """

    name: str
    said: str
    failure: str | None
    result: Mapping[str, Any]
    seconds: float
    calls: int
    kinds: Mapping[str, int]
    rows: int
    messages: list[dict[str, Any]]

    @property
    def faults(self) -> list[str]:
        return (
            [] if self.failure is None else [f"{self.name}: its episode has failed: {self.failure}"]
        )


def check_agent(args: CheckArguments, row: Row, gold: str | None, tokenizer: Any) -> AgentReport:
    """Plays an episode as a run does, in a process of its own; the model, whose `tokenizer` may be there, says `gold`, or
    that it does not know. Raises UsageError and RunFailed as `AgentProcesses`."""
    said = gold if gold is not None else "I do not know."
    script = ScriptedModel(lambda _chance: said, 0)
    policy = ScriptedPolicy(script, letters() if tokenizer is None else tokenizer)
    gateway = AgentGateway(policy)
    started = time.perf_counter()
    try:
        ended, late, record = gateway.call(_episode(args, row, gateway, policy)).result()
    finally:
        gateway.close()
    alone = args.reward_names == ["agent_reward"]
    seconds = time.perf_counter() - started
    play = EndedEpisode(
        "check", Prompt("check:0", "", (), "", (), {}), ended, late, seconds, _EPISODE_S, alone
    )
    failure, result = outcome_of(play, len(record.calls))
    return AgentReport(
        name=f"--agent {args.agent}" if args.agent is not None else "--agent_command",
        said=said,
        failure=failure,
        result=result,
        seconds=seconds,
        calls=len(record.calls),
        kinds=dict(record.kinds),
        rows=len(record.sequences),
        messages=script.messages,
    )


async def _episode(
    args: CheckArguments, row: Row, gateway: AgentGateway, policy: ScriptedPolicy
) -> tuple[EpisodeExit, bool, SessionRecord]:
    """Says how its process ended, whether it was killed since it took too long, and what its session has recorded."""
    limits = SessionLimits(calls=MOST_TURNS)
    with gateway.session(policy, SessionRequest(id="check", seed=0, limits=limits)) as state:
        policy.state = state
        url = f"{gateway.url}/v1/sessions/{state.name}/v1"
        environ = client_environment(url, state.key, policy.model_name)
        ended, late = await _played(args, row, environ, min(args.agent_timeout, _EPISODE_S))
        gateway.sessions.give_up(state, ended.given_up)
        return ended, late, state.record()


async def _played(
    args: CheckArguments, row: Row, environ: Mapping[str, str], seconds: float
) -> tuple[EpisodeExit, bool]:
    """Says how its process ended, and whether it was killed since it took too long."""
    plugins = list(args.external_plugins)
    kept = list(args.reward_env)
    processes = AgentProcesses(
        Order(plugins, args.agent, args.agent_words, args.reward_memory_limit, kept)
    )
    try:
        await processes.start()
        own = {name: value for name, value in row.items() if name != "dataset"}
        own |= {"episode_id": "check", "episode_seed": 0}
        number, ended = await processes.begin(environ, own)
        done, _ = await asyncio.wait([ended], timeout=seconds)
        if not done:
            processes.kill(number)
        return await asyncio.wait_for(ended, _KILL_S), not done
    finally:
        await processes.close()


def show_agent(report: AgentReport, console: Console) -> None:
    """Prints the report."""

    table = messages_table(f"an episode of {report.name}", report.messages)
    for name, value in report.result.items():
        table.add_row(name, cut(str(value)), style="bold" * (name == "reward"))
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items())
    table.add_row("calls of the model", f"{report.calls} ({kinds})" if kinds else str(report.calls))
    table.add_row("rows to train", str(report.rows))
    table.add_row("seconds", f"{report.seconds:.1f}")
    console.print(table)
