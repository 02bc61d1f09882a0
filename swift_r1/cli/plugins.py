"""`swift plugins [file.py ...]`: the rewards and datasets that are registered, built in or by plugin files."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from swift_r1.cli.help import wants_help
from swift_r1.errors import EXIT_OK, UsageError


def run(words: Sequence[str]) -> int:
    """Prints one line a reward and a dataset.

    Raises:
        UsageError: a flag (there are none), or a plugin file that does not load.
    """
    if wants_help(words):
        print("swift plugins [plugin.py ...]: list the registered rewards and datasets, with those of plugin files")
        return EXIT_OK
    flags = [word for word in words if word.startswith("-")]
    if flags:
        raise UsageError(f"unknown flag {flags[0]}: only plugin files can be given")
    from swift_r1.data.registry import datasets
    from swift_r1.plugins import load_plugins
    from swift_r1.rewards import orms

    load_plugins(words)
    print("Rewards (--reward_funcs):")
    for name, reward in sorted(orms.items()):
        print(f"  {name:<24} {_summary(reward)}")
    print("Datasets (--dataset):")
    for name, meta in sorted(datasets.items()):
        print(f"  {name:<24} {meta.help or ', '.join(meta.tags)}".rstrip())
    return EXIT_OK


def _summary(reward: Any) -> str:
    """First docstring line of the reward's own class or function, not one it inherits."""
    text = reward.__doc__ if not inspect.isclass(reward) else reward.__dict__.get("__doc__")
    return (text or "").strip().splitlines()[0] if text and text.strip() else ""
