"""Several tasks in one run (`--mixture`): what each has of its own, and the run's flags with that. A run without a
mixture has one task, of the name ""."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError, read_yaml, yaml_fault
from swift_r1.flags.fields import flag

OF_A_TASK = (
    # rows and prompts
    *("dataset", "val_dataset", "split_dataset_ratio", "interleave_prob", "stopping_strategy"),
    *("columns", "prompt_sampler", "agent_template", "system", "response_prefix"),
    *("enable_thinking", "chat_template_kwargs"),
    # rewards
    *("reward_funcs", "reward_weights", "renormalize_reward_weights"),
    *("truncated_reward", "missing_eos_penalty"),
    # completions and turns
    *("max_completion_length", "stop_words", "max_turns", "completion_length_limit_scope"),
    "max_episode_seconds",
    *("loss_scale", "multi_turn_scheduler", "multi_turn_timeout", "use_gym_env", "gym_env"),
    *("context_manager", "tools", "tool_timeout", "max_tool_response_length"),
    *("sandbox_provider", "sandbox_image", "sandbox_limits", "sandbox_network"),
    *("agent", "agent_command", "agent_timeout", "agent_concurrency", "env", "env_args"),
    # evaluation
    *("eval_datasets", "eval_limit", "num_generations_eval", "eval_temperature", "eval_top_p"),
    "eval_max_completion_length",
)
"""The flags that a task may have of its own; the others are the run's."""


@dataclass(frozen=True, kw_only=True)
class ShareArguments:
    """A task's share of the prompts."""

    prompts: int | None = flag(None, "prompts of each round", at_least=1)
    weight: float = flag(
        1.0, "share in the long run, beside the weights of the others", more_than=0
    )


@dataclass(frozen=True, kw_only=True)
class MixtureArguments:
    """Several tasks."""

    mixture: str | None = flag(
        None,
        "YAML file of several tasks to train on at once, in the place of --dataset: by name the flags that each has of "
        "its own, and prompts (of each round) or weight (docs/mixture.md)",
        objects=True,
    )


def written_tasks(value: str) -> Mapping[str, Any]:
    """Returns the content of a file, or of JSON in its place."""
    import yaml

    is_json = value.lstrip().startswith("{")
    place = "--mixture" if is_json else f"--mixture {value}"
    try:
        text = value if is_json else Path(value).expanduser().read_text(encoding="utf-8")
        content = read_yaml(text)
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{place}: not valid YAML ({yaml_fault(error)})") from error
    if not isinstance(content, dict) or not content:
        raise UsageError(f"{place}: must hold a mapping of tasks, each `name: {{dataset: ...}}`")
    return {str(name): written for name, written in content.items()}


def told_apart(of_each: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields the faults of tasks, by name: once where all have one, else with whose it is."""
    shared = set.intersection(*map(set, of_each.values()))
    said = set()
    for name, faults in of_each.items():
        for fault in faults:
            if fault not in shared:
                yield f"task {name}: {fault}"
            elif fault not in said:
                said.add(fault)
                yield fault
