"""The commands of a warm start, for a model whose completions earn nothing, ready to be run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from swift_r1.flags.fields import as_words
from swift_r1.flags.parser import without_flag

RIGHT = "right.jsonl"
_WARM = "output/warm"
_STEPS = 40
_BATCH = 8
_RATE = 2e-5  # of all weights: in so few steps the default teaches a small model little
_MOST_PROMPTS = 256
_ANSWERS = 16  # of `swift forecast` to a prompt
_WORDING = ("system", "prompt_template", "response_prefix")
_ROWS = (
    "dataset",
    "columns",
    "external_plugins",
    "custom_dataset_info",
    "use_hf",
    "agent_template",
)
_MODEL = ("train_type", "torch_dtype", "deepspeed", "fsdp")
_OF_FORECAST = (
    "num_prompts",
    "num_completions",
    "output_file",
    "n_best_to_keep",
    "reward_threshold",
)
_OTHERS = ("resume_from_checkpoint", "output_dir", *_OF_FORECAST)


def warm_start(
    command: Sequence[str], args: Mapping[str, Any], plan: Mapping[str, Any], seconds: float
) -> list[str]:
    """Returns the commands, with what each costs: those that teach the rows' answers, where they have some, and those
    that teach the model's own right ones.

    Args:
        command: that of the run, as it was typed.
        args: its flags, resolved.
        seconds: what an answer takes; NaN where that is not known.
    """
    if args.get("mixture"):
        return []  # of several tasks, each with its own rows
    from swift_r1.runtime.terminal import duration

    words = list(command[2:])
    for name in _OTHERS:
        words = without_flag(words, name)
    full = args.get("train_type") in (None, "full")
    begin = {name: args.get(name) for name in ("model", *_WORDING, *_MODEL) if args.get(name)}
    if full:
        begin.pop("train_type", None)
    rows = {name: args.get(name) for name in _ROWS if args.get(name)}
    sized: dict[str, Any] = {"max_steps": _STEPS, "per_device_train_batch_size": _BATCH}
    sized |= {"learning_rate": _RATE} if full else {}
    lines = []
    if plan.get("answered"):
        learn = begin | rows | sized | {"output_dir": _WARM, "add_version": False}
        checkpoint = f"{_WARM}/checkpoint-{_STEPS}"
        name = "model" if full else "adapters"
        again = [*without_flag(words, name), f"--{name}", checkpoint]
        lines += [
            f"{shlex.join(['swift', 'sft', *as_words(learn)])}  # {_STEPS * _BATCH} answers",
            shlex.join(["swift", "rlhf", *again]),
        ]
    prompts = min(plan.get("dataset_size") or _MOST_PROMPTS, _MOST_PROMPTS)
    count = prompts * _ANSWERS
    sample = [*words, "--num_prompts", str(prompts), "--output_file", RIGHT]
    cost = f"{count:,} answers" + (
        "" if math.isnan(seconds) else f", about {duration(count * seconds)}"
    )
    return [
        *lines,
        f"{shlex.join(['swift', 'forecast', *sample])}  # {cost}",
        shlex.join(["swift", "sft", *as_words(begin | {"dataset": [RIGHT]})]),
    ]
