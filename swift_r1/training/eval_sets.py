"""What a run evaluates on: its held-out prompts, and `--eval_datasets`, each with its own prompt form and reward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol

from swift_r1.arguments import RlhfArguments
from swift_r1.arguments.eval_tasks import Task
from swift_r1.data.preprocessors import Row
from swift_r1.data.prompts import Prompt, PromptEncoder
from swift_r1.errors import UsageError
from swift_r1.evaluation.questions import check_room, load_questions, prompts_of, shared_questions
from swift_r1.sampling.scoring import OpenBatch
from swift_r1.training.evaluate import MEAN, EvalSet
from swift_r1.wire.protocol import SamplingParams

_MOST_COMPARED = 200_000  # training rows that are looked through for evaluated questions

_logger = logging.getLogger("swift_r1.training")


class Rewards(Protocol):
    """The pool of reward functions."""

    def open(self, trainer_state: Any, names: Sequence[str] | None = None) -> OpenBatch: ...


def evaluates(args: RlhfArguments) -> bool:
    return args.eval_steps is not None or args.eval_on_start


def eval_rewards(args: RlhfArguments) -> list[str]:
    """Reward functions that only the evaluation needs."""
    if not evaluates(args):
        return []
    named = [task.reward for task in args.eval_tasks() if task.reward is not None]
    return [name for name in dict.fromkeys(named) if name not in args.reward_funcs]


def load_eval_prompts(args: RlhfArguments, tokenizer: Any, training: Sequence[Row]) -> list[list[Prompt]]:
    """The prompts of each of `--eval_datasets`, in their order; says where the training rows have some of them too.

    Raises:
        UsageError: data that cannot be had, or a row that cannot be used.
    """
    if not evaluates(args):
        return []
    found = []
    for task in args.eval_tasks():
        questions = load_questions(task, args.seed if args.data_seed is None else args.data_seed, args.use_hf)
        if shared := shared_questions(questions, [] if args.streaming else islice(training, _MOST_COMPARED)):
            _logger.warning(
                "%d of the %d questions of %s are in the training rows too", shared, len(questions.rows), task.name
            )
        found.append(prompts_of(questions, tokenizer, None))
    return found


def held_out_prompts(rows: Sequence[Row], encoder: PromptEncoder) -> list[Prompt]:
    """The prompts of the run's own held-out rows, but for those that are too long."""
    return [prompt for row in encoder.fitting(rows, "held-out") if (prompt := encoder.encode(row))]


def eval_sets(
    args: RlhfArguments,
    sampling: SamplingParams,
    prompts: Sequence[Sequence[Prompt]] | None,
    sizes: Sequence[int],
    rewards: Rewards | None,
    model_length: int | None,
) -> list[EvalSet]:
    """The sets of every rank.

    Args:
        sampling: of training.
        prompts: on the main rank, the held-out ones and those of each of `--eval_datasets`; None elsewhere.
        sizes: their numbers, on every rank.
        rewards: on the main rank.
        model_length: longest prompt with completion in tokens, on the main rank.

    Raises:
        UsageError: a prompt leaves no room for its completion, or two sets have the same name.
    """
    tasks = args.eval_tasks() if evaluates(args) else []
    found: list[EvalSet] = []
    held_out = Task(
        name="held out",
        dataset="",
        num_generations=args.num_generations_eval or args.num_generations,
        temperature=float(args.eval_temperature or 0.0),
        top_p=args.eval_top_p,
        max_completion_length=int(args.eval_max_completion_length or args.max_completion_length),
    )
    for number, (task, size) in enumerate(zip([held_out, *tasks], sizes, strict=True)):
        if not size:
            continue
        own = prompts[number] if prompts is not None else ()
        if number and prompts is not None:
            check_room(task, own, model_length)
        names = [task.reward] if task.reward is not None else args.reward_funcs
        weights = [1.0] if task.reward is not None else args.reward_weights or []
        found.append(
            EvalSet(
                name=task.name if number else None,
                prompts=own,
                num_prompts=size,
                num_generations=task.num_generations,
                sampling=sampling.model_copy(
                    update={
                        "temperature": task.temperature,
                        "top_p": task.top_p,
                        "top_k": -1,
                        "max_tokens": task.max_completion_length,
                        "stop_token_ids": _with_turn_end(sampling.stop_token_ids, own),
                    }
                ),
                open_rewards=_opener(rewards, names) if rewards is not None else None,
                weights=tuple(weights),
            )
        )
    names_of_sets = [name for one in found for name in one.names()]
    for name in sorted({name for name in names_of_sets if names_of_sets.count(name) > 1}):
        raise UsageError(f"two evaluated data sets have the name {name}: name one otherwise in --eval_datasets")
    if MEAN in names_of_sets and len(names_of_sets) > 1:
        raise UsageError(
            f"an evaluated data set has the name {MEAN}, which the mean of all of them has: name it otherwise"
        )
    return found


def _with_turn_end(ends: tuple[int, ...], prompts: Sequence[Prompt]) -> tuple[int, ...]:
    """A set may have another template than training, so that its turns end with another token."""
    return tuple(sorted({*ends, *(one.turn_end for one in prompts[:1] if one.turn_end is not None)}))


def _opener(rewards: Rewards, names: Sequence[str]) -> Callable[[Any], OpenBatch]:
    return lambda state: rewards.open(state, names)
