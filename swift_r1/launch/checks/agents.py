"""What `swift check --agent` and `--agent_command` show: one episode, with a script in the model's place."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from swift_r1.data.preprocessors import Row
from swift_r1.data.prompts import Prompt
from swift_r1.errors import UsageError, one_line
from swift_r1.flags.rlhf import CheckArguments
from swift_r1.launch.checks.environments import cut, messages_table
from swift_r1.plugins.environments.scripted import ScriptedModel
from swift_r1.rollout.agents.outcome import EndedEpisode, outcome_of
from swift_r1.rollout.agents.parent import Order
from swift_r1.rollout.agents.processes import AgentProcesses, EpisodeExit, told
from swift_r1.serving.openai_messages import ChatRequest, CompletionRequest
from swift_r1.serving.sessions.calls import Asked
from swift_r1.serving.sessions.session import SessionState
from swift_r1.wire.protocol import SamplingParams
from swift_r1.wire.sessions import SessionRequest

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


def check_agent(args: CheckArguments, row: Row, gold: str | None) -> AgentReport:
    """Plays an episode as a run does, in a process of its own; the model says `gold`, or that it does not know. Raises
    UsageError and RunFailed as `AgentProcesses`."""
    said = gold if gold is not None else "I do not know."
    model = ScriptedModel(lambda _chance: said, 0)
    started = time.perf_counter()
    with model.serve() as url:
        ended, late = asyncio.run(_played(args, row, url, min(args.agent_timeout, _EPISODE_S)))
    alone = args.reward_names == ["agent_reward"]
    seconds = time.perf_counter() - started
    play = EndedEpisode(
        "check", Prompt("check:0", "", (), "", (), {}), ended, late, seconds, _EPISODE_S, alone
    )
    failure, result = outcome_of(play, len(model.requests))
    name = f"--agent {args.agent}" if args.agent is not None else "--agent_command"
    try:
        record = _session(model).record()
    except ValidationError as error:
        raise UsageError(
            f"{name}: a run would refuse a request of its (400): {one_line(error)}"
        ) from error
    return AgentReport(
        name=name,
        said=said,
        failure=failure,
        result=result,
        seconds=seconds,
        calls=len(model.requests),
        kinds=dict(record.kinds),
        rows=len(record.sequences),
        messages=model.messages,
    )


async def _played(
    args: CheckArguments, row: Row, url: str, seconds: float
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
        number, ended = await processes.begin(told(url, "none", "policy"), own)
        done, _ = await asyncio.wait([ended], timeout=seconds)
        if not done:
            processes.kill(number)
        return await asyncio.wait_for(ended, _KILL_S), not done
    finally:
        await processes.close()


class _Counted:
    """A `Wording` that needs no tokenizer: a message is a token."""

    special: frozenset[int] = frozenset()

    def render(self, messages: Any, tools: Any) -> tuple[int, ...]:
        return (1,) * len(messages)

    def behind(self, messages: Any, place: int, tools: Any) -> tuple[int, ...]:
        return (1,) * (len(messages) - place - 1)

    def encode(self, text: str) -> tuple[int, ...]:
        return (1,)

    encode_more = encode

    def texts(self, token_ids: Any) -> list[str]:
        return ["-"] * len(token_ids)


def _session(model: ScriptedModel) -> SessionState:
    """Returns the session that its requests would have been, one after another."""
    state = SessionState("check", SessionRequest(), "")
    wording = _Counted()
    for body, answer in zip(model.requests, model.answers, strict=True):
        text = json.dumps(body)
        if "prompt" in body:
            chat = Asked(prompt=str(CompletionRequest.model_validate_json(text).prompt))
        else:
            request = ChatRequest.model_validate_json(text)
            chat = Asked(request.template_messages, request.template_tools)
        call, _ = state.begin(chat, wording)
        call.sampling = SamplingParams(max_tokens=1)
        state.finish(call, [1], [0.0], ((0, 0),), "stop", "", answer)
    return state


def show_agent(report: AgentReport, console: Console) -> None:
    """Prints the report."""
    from rich.markup import escape

    table = messages_table(f"an episode of {report.name}", report.messages)
    for name, value in report.result.items():
        table.add_row(escape(name), escape(cut(str(value))), style="bold" * (name == "reward"))
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items())
    table.add_row("calls of the model", f"{report.calls} ({kinds})" if kinds else str(report.calls))
    table.add_row("rows to train", str(report.rows))
    table.add_row("seconds", f"{report.seconds:.1f}")
    console.print(table)
