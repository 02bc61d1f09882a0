"""What is wrong with `--reward_model` and its plugins, told by names and config.json before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from swift_r1.data.prompt_templates import prompt_template
from swift_r1.errors import UsageError, no_such
from swift_r1.flags.reward import RewardModel
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.launch.checks.model_folder import config_of
from swift_r1.rewards import orms
from swift_r1.rollout.rm_plugins import DefaultRMPlugin, GenRMPlugin, known_plugins


def reward_model_faults(args: RlhfArguments) -> list[str]:
    """Plugins and templates that there are not, names that are taken, and models of another kind than the plugin's; the
    plugins are loaded."""
    return [fault for one in args.reward_models for fault in _faults(one)]


def _faults(one: RewardModel) -> Iterator[str]:
    if one.name in orms:
        yield f"--reward_model {one.path}: a reward function has the name {one.name} too: name the folder otherwise"
    if one.template is not None:
        try:
            prompt_template(one.template)
        except UsageError as error:
            yield from (fault.replace("--prompt_template", "--reward_template") for fault in error.faults)
    plugins = known_plugins()
    plugin = plugins.get(one.plugin)
    if plugin is None:
        yield f"--reward_model_plugin: {no_such('reward model plugin', one.plugin, sorted(plugins))}"
    built = config_of(Path(one.path).expanduser()).get("architectures") or []
    if not built or one.adapters is not None:  # adapters may bring the head
        return
    classifies = any(name.endswith("ForSequenceClassification") for name in built)
    if plugin is DefaultRMPlugin and not classifies:
        yield (
            f"--reward_model {one.path} is a {built[0]}, which has no classification head: --reward_model_plugin genrm "
            "asks it"
        )
    if inspect.isclass(plugin) and issubclass(plugin, GenRMPlugin) and classifies:
        yield f"--reward_model {one.path} is a {built[0]}, which cannot be asked: leave --reward_model_plugin out"
