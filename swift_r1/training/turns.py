"""Opens what leads conversations with the model: one turn, a scheduler of several with its tools, or an agent."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from swift_r1.data.prompts import PromptEncoder, Wording, tokenizer_of_run
from swift_r1.errors import UsageError
from swift_r1.flags import RunFlags
from swift_r1.plugins import load_plugins
from swift_r1.plugins.rollouts import RolloutScheduler, multi_turns
from swift_r1.plugins.tools.parsing import ToolCallParser, chosen_parser
from swift_r1.plugins.tools.scheduler import ToolKit, check_tool_answers
from swift_r1.rollout.agents.gateway import AgentGateway, AgentModel
from swift_r1.rollout.agents.parent import Order
from swift_r1.rollout.agents.processes import AgentProcesses
from swift_r1.rollout.agents.runner import AgentLimits, AgentRunner
from swift_r1.rollout.base import EmbeddedRollouts, Generator
from swift_r1.rollout.multi_turn import (
    BatchedTurns,
    EpisodeRunner,
    ServedTurns,
    SingleTurn,
    Turns,
)
from swift_r1.rollout.prefetch import MakeTurns, PrefetchRollouts
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.rollout.schedulers import Limits, SchedulerRunner, TurnEngine
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.base import PromptTokenizer
from swift_r1.serving.openai_messages import ToolCalls
from swift_r1.training.setup import Context, ModelFacts

logger = logging.getLogger("swift_r1.training")

_CLOSE_S = 30.0  # for episodes to be killed


def open_tools(context: Context, args: RunFlags, ends: tuple[int, ...]) -> ToolKit | None:
    """Returns what reads and makes tool calls, on rank 0 where a task does. Raises UsageError where no parser is known
    or can be used, the chat template has no place for tools, or workers lack some."""
    tokenizer = context.tokenizer
    if not args.calls_tools:
        return None
    from swift_r1.plugins.tools.pool import EpisodeToolsOwner, ToolLimits, ToolPool
    from swift_r1.plugins.tools.shell import ShellTools

    encoder = PromptEncoder(tokenizer, wording=Wording.of(args))
    check_tool_answers(encoder)
    name, why = chosen_parser(args.tool_call_parser, encoder.template)
    if name is None:
        raise UsageError(
            f"tool calls cannot be read: {why}; --tool_call_parser names vLLM's parser of this model"
        )
    logger.info("tool calls are read by vLLM's parser %s (%s)", name, why)
    limits = ToolLimits(args.tool_timeout, args.max_tool_response_length)
    pool = ToolPool(args, limits, partial(load_plugins, args.external_plugins))
    context.cleanup.enter_context(pool)
    parser = ToolCallParser(name, tokenizer)
    pool.wait_ready(args.tools)
    shells = ShellTools(args.sandbox_provider, args.sandbox_spec, limits)
    owners: list[EpisodeToolsOwner] = [context.cleanup.enter_context(shells)]
    if args.mcp_servers is not None:
        from swift_r1.plugins.tools.mcp_servers import McpServers, read_servers

        servers = McpServers(read_servers(args.mcp_servers), limits)
        owners.append(context.cleanup.enter_context(servers))
    return ToolKit(parser, pool, ends, owners)


def open_turns(context: Context, facts: ModelFacts) -> MakeTurns:
    """Returns what drives conversations of one turn, and those that a task's scheduler or agent leads. Raises as
    `open_tools`, `open_agents`."""
    tokenizer: Any = context.tokenizer
    runners: dict[str, EpisodeRunner] | None = None
    takes_turns = context.args.takes_turns and context.start.replay is None
    if takes_turns and context.ranks.is_rank0:
        runners = {
            task.name: _open_runner(context, task.args, facts)
            for task in context.args.tasks
            if task.args.takes_turns
        }

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    def drive(generator: Generator, ranks: Ranks) -> Turns:
        if not takes_turns:
            return SingleTurn(generator, decode)
        if isinstance(generator, EmbeddedRollouts):
            return BatchedTurns(generator, ranks, runners, decode)
        assert isinstance(generator, ServerRollouts | PrefetchRollouts)
        return ServedTurns(generator, runners, decode)

    return drive


def _open_runner(context: Context, args: RunFlags, facts: ModelFacts) -> EpisodeRunner:
    """Returns what leads the conversations of a task, whose flags are `args`; on rank 0."""
    if args.plays_agent:
        return open_agents(context, args, facts)
    return open_scheduler(context, args, facts, open_tools(context, args, facts.ends))


def open_scheduler(
    context: Context, args: RunFlags, facts: ModelFacts, tool_kit: ToolKit | None
) -> SchedulerRunner:
    """Returns what leads conversations by the scheduler of a task, on rank 0."""
    name = args.multi_turn_scheduler
    assert name is not None
    more: dict[str, Any] = (
        {"gym_env": args.gym_env, "context_manager": args.context_manager} if args.plays_gym else {}
    )
    if tool_kit is not None:
        more["kit"] = tool_kit

    def make_scheduler(engine: TurnEngine) -> RolloutScheduler:
        made: RolloutScheduler = multi_turns[name](
            infer_engine=engine, max_turns=args.max_turns, tokenizer=context.tokenizer, **more
        )
        return made

    total = args.completion_length_limit_scope == "total"
    runner = SchedulerRunner(
        name,
        args.multi_turn_timeout,
        make_scheduler,
        PromptEncoder(context.tokenizer, wording=Wording.of(args)),
        facts.ends,
        Limits(
            facts.max_length,
            total,
            args.max_turns,
            args.temperature,
            args.max_episode_seconds,
        ),
        args.loss_scale == "last_round",
        tool_kit.pool.worked if tool_kit else lambda: 0.0,
    )
    context.cleanup.callback(runner.close)
    return runner


def open_agents(context: Context, args: RunFlags, facts: ModelFacts) -> AgentRunner:
    """Returns what runs episodes, on rank 0. Raises UsageError where plugins fail in the process of episodes."""
    wording = Wording.of(args)
    prompts = PromptTokenizer(tokenizer_of_run(context.tokenizer, wording))
    tool_calls = ToolCalls(args.tool_call_parser, prompts.tokenizer)
    logger.info("%s", tool_calls.said())
    model = AgentModel(
        prompts,
        tool_calls,
        facts.max_length or sys.maxsize,
        facts.vocab_size,
        facts.ends,
        tuple(args.stop_words),
        bool(args.use_vllm),
    )
    gateway = AgentGateway(model)
    context.cleanup.callback(gateway.close)
    plugins = list(args.external_plugins)
    memory = args.reward_memory_limit
    env_args = args.env_args if args.env is not None else None
    order = Order(plugins, args.agent, args.agent_words, memory, list(args.reward_env), env_args)
    processes = AgentProcesses(order)
    context.cleanup.callback(lambda: gateway.call(processes.close()).result(_CLOSE_S))
    gateway.call(processes.start()).result()
    total = args.completion_length_limit_scope == "total"
    alone = args.reward_names == ["agent_reward"]
    limits = AgentLimits(
        args.agent_timeout,
        args.max_turns,
        total,
        needs_reward=alone,
        whole_seconds=args.max_episode_seconds,
    )
    return AgentRunner(gateway, processes, limits, args.agent_concurrency)
