"""`swift check`: tries plugins, data and rewards without loading a model."""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from swift_r1.errors import EXIT_OK, EXIT_USAGE
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import CheckArguments

_USAGE = """swift check --external_plugins plugin.py --dataset D --reward_funcs R [--model M] [--flag value ...]

Loads plugins, preprocesses rows, shows a prompt, and calls each reward with made-up completions: a right one (--gold),
a wrong one, an empty one, a long one, garbage and hostile ones. Of an agent or environment it plays an episode, with a
script in the model's place. No weights are loaded. The flags of a whole `swift rlhf` command may be given. Exit code 2
if something would break a run."""
_EXAMPLES = """
swift check --external_plugins plugins/countdown.py --dataset countdown --reward_funcs external_countdown format
swift check --dataset sums.jsonl --external_plugins sums.py --gold '<answer>{solution}</answer>' --json
swift check --registered --external_plugins sums.py
"""
HELP = (
    _USAGE,
    CheckArguments,
    _EXAMPLES,
    ("Check", "Plugins and rewards", "Built-in rewards", "Data"),
)


def run(words: Sequence[str]) -> int:
    """Runs the command; bad flags raise UsageError, all other faults are in the report."""
    args = parse_arguments(CheckArguments, words)
    if args.registered:
        _list_registered(args.external_plugins)
        return EXIT_OK
    # What plugins print, here or in their processes, must not get between the lines of the report.
    with _standard_output_kept() as output:
        from swift_r1.launch.checks.run import run_checks, show

        # Warnings about invalid rewards and rows that are left out are in the report.
        with _only_errors("swift_r1.rewards", "swift_r1.data.rows"):
            report = run_checks(args)
        if args.json:
            json.dump(report.to_json(), output, ensure_ascii=False, allow_nan=False)
            output.write("\n")
        else:
            from swift_r1.runtime.terminal import Terminal

            show(report, Terminal(file=output))
    return EXIT_OK if report.ok else EXIT_USAGE


def _list_registered(plugins: Sequence[str]) -> None:
    """Prints a line for each reward, dataset and so on. Raises UsageError: a plugin file does not load."""
    from swift_r1.data.registry import builtin_datasets, datasets
    from swift_r1.data.sampler import samplers
    from swift_r1.data.tool_registry import tools
    from swift_r1.plugins import load_plugins
    from swift_r1.plugins.agents import agents
    from swift_r1.plugins.rollouts import context_managers, envs, multi_turns
    from swift_r1.record.reporters import trackers
    from swift_r1.rewards import orms
    from swift_r1.rollout.rm_plugins import known_plugins

    load_plugins(plugins)
    registries: dict[str, Mapping[str, Any]] = {
        "Rewards (--reward_funcs)": orms,
        "Reward model plugins (--reward_model_plugin)": known_plugins(),
        "Datasets (--dataset)": {
            name: meta.help or ", ".join(meta.tags)
            for name, meta in (builtin_datasets | datasets).items()
        },
        "Schedulers (--multi_turn_scheduler)": multi_turns,
        "Environments (--gym_env)": envs,
        "Context managers (--context_manager)": context_managers,
        "Samplers (--prompt_sampler)": samplers,
        "Tools (--tools)": tools,
        "Agents (--agent)": agents,
        "Trackers (--report_to)": trackers,
    }
    for title, registry in registries.items():
        if registry:
            print(f"{title}:")
        for name, entry in sorted(registry.items()):
            print(f"  {name:<24} {entry if isinstance(entry, str) else _summary(entry)}".rstrip())


def _summary(entry: Any) -> str:
    """Returns the first sentence of the docstring of an entry's own class or function, not one it inherits."""
    if inspect.isroutine(entry):
        text = entry.__doc__
    else:
        text = (entry if inspect.isclass(entry) else type(entry)).__dict__.get("__doc__")
    paragraph = " ".join((text or "").strip().partition("\n\n")[0].split())
    sentence, stop, _ = f"{paragraph} ".partition(". ")
    return sentence.strip() + stop.strip()


@contextmanager
def _only_errors(*names: str) -> Iterator[None]:
    """Silences the loggers `names` below ERROR, and gives them their levels back."""
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _standard_output_kept() -> Iterator[TextIO]:
    """Yields the real standard output; what is written to it meanwhile, by child processes too, goes to standard
    error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(kept, "w", encoding="utf-8", closefd=False) as output:
            yield output
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
