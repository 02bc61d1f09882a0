"""A task's questions: every row of its data, in order. A question that cannot be asked is an error, never left out."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from swift_r1.data.images import images_of, placeless
from swift_r1.data.preprocessors import Row
from swift_r1.data.prompt_templates import template_arguments
from swift_r1.data.prompts import Prompt, PromptEncoder, Wording
from swift_r1.data.registry import find_dataset
from swift_r1.data.resolve import DATA_FOLDER, open_sources
from swift_r1.data.rows import Drops, preprocessed
from swift_r1.data.sources import DataFlags, Split
from swift_r1.data.vision import VisionProcessor
from swift_r1.errors import UsageError
from swift_r1.flags.eval_tasks import EvalTask
from swift_r1.rewards.orm import build_rewards
from swift_r1.wire.protocol import completion_seed

_logger = logging.getLogger("swift_r1.lab.evaluation")
_ALONE = DataFlags(())  # outside a run


@dataclass(frozen=True, slots=True)
class Questions:
    """The rows of a task, each with `messages` and its columns; `sha256` is of questions and gold answers in order."""

    task: EvalTask
    rows: Sequence[Row]
    sha256: str
    agent_template: str | None = None  # describes the tools of rows


def load_questions(task: EvalTask, flags: DataFlags = _ALONE) -> Questions:
    """Reads the held-out split where the data set has one, else all of it, as a run with such flags reads its rows;
    `prompt_id` is `<task name>:<row>`. Raises UsageError: unknown or unreadable data, a row that cannot be used, or no
    limit for data without an end."""
    (source,) = open_sources([task.dataset], use_hf=flags.use_hf)
    flags = replace(flags, columns={}, strict=False)
    if task.benchmark is not None:
        meta = find_dataset(task.benchmark)
        assert meta is not None, task.benchmark
        source = replace(source, preprocess=meta.preprocess_func)
    source = replace(source, label=task.name)
    split: Split = "eval" if source.has_held_out else "train"
    if source.samples_itself and task.limit is None:
        raise UsageError(
            f"{task.name} makes as many questions as it is asked for: say how many, {task.dataset}#500"
        )
    count = task.limit if source.samples_itself else None
    drops = Drops()
    try:
        read = preprocessed(source, source.rows(split, count, flags.seed), flags, drops)
        rows = list(islice(read, task.limit))
    except UsageError as error:
        if source.place is None:
            raise
        hint = f"a file is named by {task.name}=FILE, a folder of them by {DATA_FOLDER}"
        raise UsageError(*(f"{task.name}: {fault} ({hint})" for fault in error.faults)) from error
    if drops.broken:
        examples = "; ".join(drops.examples)
        raise UsageError(
            f"{task.name}: {drops.broken} of {drops.seen} rows cannot be used: {examples}"
        )
    if not rows:
        raise UsageError(f"{task.name}: {task.dataset} has no rows")
    if drops.filtered:
        _logger.info(
            "%s: the preprocessor of its data leaves out %d rows", task.name, drops.filtered
        )
    if task.limit is not None and len(rows) < task.limit:
        _logger.info("%s has %d questions, %d were asked for", task.name, len(rows), task.limit)
    digest = hashlib.sha256()
    for row in rows:  # what it asks and what is right; where it came from does not count
        content = {
            key: value
            for key, value in placeless(row).items()
            if key not in ("dataset", "prompt_id")
        }
        digest.update(
            json.dumps(content, sort_keys=True, ensure_ascii=True, default=str).encode() + b"\n"
        )
    if task.instruction:
        for row in rows:
            *before, last = row["messages"]
            row["messages"] = [
                *before,
                {**last, "content": f"{last['content']}\n{task.instruction}"},
            ]
    return Questions(task, rows, digest.hexdigest(), flags.agent_template)


def prompts_of(
    questions: Questions, tokenizer: Any, longest: int | None, model: str
) -> list[Prompt]:
    """Returns the prompts of all questions; the processor of `model` reads their images. Raises UsageError as
    `check_room`, and without a chat template."""
    task = questions.task
    arguments = template_arguments(task.enable_thinking, task.chat_template_kwargs)
    asked = task.system or None, task.prompt_template, task.response_prefix, arguments
    vision = partial(VisionProcessor.load, model, tokenizer)
    encoder = PromptEncoder(tokenizer, Wording(*asked, questions.agent_template), vision=vision)
    encoded = [prompt for row in questions.rows if (prompt := encoder.encode(row)) is not None]
    assert len(encoded) == len(questions.rows), "an encoder without a limit"
    check_room(task, encoded, longest)
    return encoded


def check_room(task: EvalTask, prompts: Sequence[Prompt], longest: int | None) -> None:
    """Raises UsageError where a prompt leaves no room for the longest completion in `longest` tokens (None: any)."""
    most = max(prompts, key=lambda prompt: len(prompt.token_ids))
    needed = len(most.token_ids) + task.max_completion_length
    if longest is not None and needed > longest:
        raise UsageError(
            f"{task.name}: the prompt of {most.prompt_id} has {len(most.token_ids)} tokens, and with "
            f"{task.max_completion_length} of the completion that is {needed}, but the model takes {longest}: "
            f"a completion may have {max(0, longest - len(most.token_ids))} at most"
        )


def unfit_rewards(questions: Questions, rewards: Sequence[str], args: Any) -> list[str]:
    """Reward functions that are unknown, cannot be built, or lack a column of the questions."""
    columns: frozenset[str] = frozenset.intersection(*(frozenset(row) for row in questions.rows))
    try:
        build_rewards(rewards, columns, args)
    except UsageError as error:
        return [f"{questions.task.name}: {fault}" for fault in error.faults]
    return []


def shared_questions(questions: Questions, training: Iterable[Row]) -> int:
    """Returns how many of the questions are among the training rows: the user's text, without the instruction, and the
    images."""

    def asked(row: Row, instruction: str = "") -> tuple[str, ...]:
        text = " ".join(row["messages"][-1]["content"].removesuffix(instruction).split())
        return (text, *(image.sha256 for image in images_of(row)))

    known = set(map(asked, training))
    return sum(asked(row, questions.task.instruction) in known for row in questions.rows)


def evaluation_seeds(seed: int, prompt_id: str, n: int) -> tuple[int, ...]:
    """One seed per completion: of the question and its number, so that an evaluation in training has the same."""
    return tuple(completion_seed(seed, "eval", prompt_id, index) for index in range(n))
