"""What flags name of plugins: rewards, reward models, schedulers, tools and agents that nothing registered, or that
cannot be run."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from swift_r1.data.prompt_templates import prompt_template
from swift_r1.data.tool_registry import described, tools
from swift_r1.errors import UsageError, no_such
from swift_r1.flags.reward import RewardModel
from swift_r1.flags.rollout import TurnArguments
from swift_r1.flags.run import RunFlags
from swift_r1.launch.checks.model_folder import config_of
from swift_r1.plugins.agents import Agent, agents
from swift_r1.plugins.compat import instead_of
from swift_r1.plugins.rollouts import context_managers, envs, multi_turns
from swift_r1.rewards import orms
from swift_r1.rewards.orm import is_built_in
from swift_r1.rollout.rm_plugins import DefaultRMPlugin, GenRMPlugin, known_plugins


def _missing(
    flag: str, what: str, names: Iterable[str], registry: Mapping[str, Any], more: str = ""
) -> list[str]:
    known = sorted(registry, key=lambda name: (is_built_in(name), name))  # a plugin's rewards first
    return [
        f"--{flag}: {no_such(what, name, known, more)}" for name in names if name not in registry
    ]


def name_faults(args: RunFlags) -> list[str]:
    """Says what is wrong with all that the flags name of plugins."""
    return [
        *reward_name_faults(args),
        *reward_model_faults(args),
        *scheduler_name_faults(args),
        *_tool_faults(args),
        *_agent_faults(args),
    ]


def reward_name_faults(args: RunFlags) -> list[str]:
    """Finds reward functions that nothing registered."""
    more = "" if args.external_plugins else "; others come from --external_plugins"
    return _missing("reward_funcs", "reward function", args.called_rewards, orms, more)


def scheduler_name_faults(args: TurnArguments) -> list[str]:
    """Finds a scheduler, environment or context manager that nothing registered, or that needs ms-swift itself."""
    named = (
        ("multi_turn_scheduler", "scheduler", args.multi_turn_scheduler, multi_turns),
        ("gym_env", "environment", args.gym_env, envs),
        ("context_manager", "context manager", args.context_manager, context_managers),
    )
    faults = []
    for flag, what, name, registry in named:
        if name is None:
            continue
        instead = instead_of(registry[name]) if name in registry else None
        if name not in registry:
            faults += _missing(flag, what, [name], registry)
        elif instead is not None:
            faults.append(f"--{flag} {name} needs a class that only ms-swift has: {instead}")
        elif _leads_many(registry[name]):
            faults.append(
                f"--{flag} {name} leads many completions together (async_infer), as trees of them; here a scheduler "
                "leads one: override run or step"
            )
    return faults


def _tool_faults(args: RunFlags) -> list[str]:
    """Tools that nothing registered, and registered ones that cannot be described to a model."""
    faults = _missing("tools", "tool", args.tools, tools)
    for name in tools:
        try:
            described(name)
        except UsageError as error:
            faults += error.faults
    return faults


def _agent_faults(args: RunFlags) -> list[str]:
    """Finds an agent that nothing registered, or that cannot be run."""
    words = args.agent_words
    if words is not None:
        if shutil.which(words[0]):
            return []
        if os.path.isfile(words[0]):
            return [
                f"--agent_command: {words[0]} is not executable: chmod +x, or name what runs it"
            ]
        return [f"--agent_command: there is no program {words[0]} that can be run"]
    if args.agent is None:
        return []
    if args.agent not in agents:
        return _missing("agent", "agent", [args.agent], agents)
    why = why_no_agent(agents[args.agent])
    if why is not None:
        return [f"--agent {args.agent}: {why}"]
    if importlib.util.find_spec("openai") is None:
        return [
            "--agent needs the package openai, of which agents get a client: pip install 'swift-r1[agents]'"
        ]
    return []


def why_no_agent(agent: Any) -> str | None:
    """Says why a registered agent cannot be run."""
    if not inspect.isclass(agent) or not issubclass(agent, Agent):
        return f"{agent!r} is not a class derived from Agent"
    if not inspect.iscoroutinefunction(agent.run):
        return f"{agent.__name__} needs `async def run(self, client, row)`"
    return None


def _leads_many(scheduler: Any) -> bool:
    """Says whether a scheduler of a plugin does what ms-swift asks of it for a whole batch."""
    own = getattr(scheduler, "async_infer", None)
    return own is not None and not own.__module__.startswith("swift.")


def reward_model_faults(args: RunFlags) -> list[str]:
    """Finds plugins and templates that there are not, names that are taken, and models of another kind than their
    plugin's. The plugins are loaded; models are told by config.json."""
    return [fault for model in args.reward_models for fault in _reward_model_faults(model)]


def _reward_model_faults(model: RewardModel) -> Iterator[str]:
    if model.name in orms:
        yield f"--reward_model {model.path}: a reward function has the name {model.name} too: name the folder otherwise"
    if model.template is not None:
        try:
            prompt_template(model.template)
        except UsageError as error:
            yield from (
                fault.replace("--prompt_template", "--reward_template") for fault in error.faults
            )
    plugins = known_plugins()
    plugin = plugins.get(model.plugin)
    if plugin is None:
        yield f"--reward_model_plugin: {no_such('reward model plugin', model.plugin, sorted(plugins))}"
    built = config_of(Path(model.path).expanduser()).get("architectures") or []
    if not built or model.adapters is not None:  # adapters may bring the head
        return
    classifies = any(name.endswith("ForSequenceClassification") for name in built)
    if plugin is DefaultRMPlugin and not classifies:
        yield (
            f"--reward_model {model.path} is a {built[0]}, which has no classification head: --reward_model_plugin "
            "genrm asks it"
        )
    if inspect.isclass(plugin) and issubclass(plugin, GenRMPlugin) and classifies:
        yield f"--reward_model {model.path} is a {built[0]}, which cannot be asked: leave --reward_model_plugin out"
