"""`swift plugins [file.py ...]`: everything that is registered, built in or by plugin files, with its one-line help."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from swift_r1.errors import EXIT_OK, UsageError

HELP = (
    "swift plugins [--external_plugins] [plugin.py ...]: list what is registered, also by plugin files",
)
_FLAG = "--external_plugins"


def run(words: Sequence[str]) -> int:
    """Prints a line for each. Raises UsageError: an unknown flag, or a plugin file that does not load."""
    # The flag of the other commands may stand before the files.
    files = [file for word in words if (file := word.removeprefix(f"{_FLAG}=")) != _FLAG]
    flags = [file for file in files if file.startswith("-")]
    if flags:
        raise UsageError(
            f"unknown flag {flags[0]}: only plugin files can be given, also after {_FLAG}"
        )
    if _FLAG in words and not files:
        raise UsageError(f"{_FLAG} needs a plugin file")
    from swift_r1.data.registry import builtin_datasets, datasets
    from swift_r1.data.sampler import samplers
    from swift_r1.data.tool_registry import tools
    from swift_r1.plugins import load_plugins
    from swift_r1.plugins.agents import agents
    from swift_r1.plugins.rollouts import context_managers, envs, multi_turns
    from swift_r1.rewards import orms
    from swift_r1.rollout.rm_plugins import known_plugins

    load_plugins(files)
    known = builtin_datasets | datasets
    for title, lines in (
        ("Rewards (--reward_funcs):", _summaries(orms)),
        ("Reward model plugins (--reward_model_plugin):", _summaries(known_plugins())),
        (
            "Datasets (--dataset):",
            {name: meta.help or ", ".join(meta.tags) for name, meta in known.items()},
        ),
        ("Schedulers (--multi_turn_scheduler):", _summaries(multi_turns)),
        ("Environments (--gym_env):", _summaries(envs)),
        ("Context managers (--context_manager):", _summaries(context_managers)),
        ("Samplers (--prompt_sampler):", _summaries(samplers)),
        ("Tools (--tools):", _summaries(tools)),
        ("Agents (--agent):", _summaries(agents)),
    ):
        if lines:
            print(title)
        for name, text in sorted(lines.items()):
            print(f"  {name:<24} {text}".rstrip())
    return EXIT_OK


def _summaries(registry: Mapping[str, Any]) -> dict[str, str]:
    return {name: summary(entry) for name, entry in registry.items()}


def summary(entry: Any) -> str:
    """Returns the first sentence of the docstring of an entry's own class or function, not one it inherits."""
    if inspect.isroutine(entry):
        text = entry.__doc__
    else:
        text = (entry if inspect.isclass(entry) else type(entry)).__dict__.get("__doc__")
    paragraph = " ".join((text or "").strip().partition("\n\n")[0].split())
    sentence, stop, _ = f"{paragraph} ".partition(". ")
    return sentence.strip() + stop.strip()
