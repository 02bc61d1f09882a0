"""Evaluation during training: the same engine on the weights of that step, on the run's held-out prompts and on each of
`--eval_datasets` with its own prompt form and reward."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from swift_r1.algorithms.rewards import Composition, mean
from swift_r1.data.preprocessors import Row
from swift_r1.data.prompts import Prompt
from swift_r1.errors import UsageError
from swift_r1.flags import RunFlags
from swift_r1.flags.eval_tasks import EvalTask
from swift_r1.flags.run import Task
from swift_r1.rollout.base import GroupRequest, still_wanted
from swift_r1.rollout.rounds import RoundSampler
from swift_r1.rollout.scoring import (
    Grading,
    Gradings,
    OpenRewards,
    ScoredRound,
    completion_metrics,
    completion_row,
    reward_metrics,
)
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.training.evaluation.questions import (
    check_room,
    evaluation_seeds,
    load_questions,
    prompts_of,
    shared_questions,
)
from swift_r1.training.evaluation.results import RULES, Graded, summarize
from swift_r1.wire.protocol import SamplingParams

MEAN = "mean"  # the name in the metrics of the plain mean over several sets
_AVERAGED = ("accuracy", "reward", "completions/mean_length")
_MOST_COMPARED = 200_000  # training rows that are searched for evaluated questions

Metrics = dict[str, float]
Rows = list[dict[str, Any]]

_logger = logging.getLogger("swift_r1.training")


class EvaluationLeft(Exception):
    """Tells all ranks that the run is to end, and the evaluation with it."""


@dataclass(frozen=True)
class EvalSet:
    """Prompts that are evaluated in the same way."""

    name: str | None  # in the metrics' names; None for the names of the prompts' own data sets
    prompts: Sequence[Prompt]  # on rank 0; empty on the others
    num_prompts: int  # their number, known to every rank
    num_generations: int  # completions per prompt
    sampling: SamplingParams
    gradings: Gradings | None  # on rank 0; the first of the functions says what is right

    def names(self) -> list[str]:
        return (
            [self.name]
            if self.name is not None
            else sorted({prompt.dataset for prompt in self.prompts})
        )


@dataclass(frozen=True)
class Evaluator:
    """Evaluates all sets, one after the other."""

    sets: Sequence[EvalSet]
    sampler: RoundSampler  # of the run's rounds

    @property
    def num_completions(self) -> int:
        return sum(one.num_prompts * one.num_generations for one in self.sets)

    def run(self, step: int, unwanted: Callable[[], bool]) -> tuple[Metrics, Rows] | None:
        """The metrics under `eval/<name>/`, and one row per completion for `eval_completions.jsonl`; on rank 0.

        Collective. The seeds do not depend on the step, so that two evaluations differ by their weights alone. Raises
        EvaluationLeft on all ranks soon after `unwanted` is True on one.
        """
        rollouts = self.sampler.rollouts
        rollouts.unwanted = unwanted
        try:
            found = [(one, self._scored(one, step, unwanted)) for one in self.sets]
        finally:
            rollouts.unwanted = still_wanted
        metrics: Metrics = {}
        rows: Rows = []
        for one, scored in found:
            if scored is None:
                return None
            for name in one.names():
                named = one.name is not None
                own = [item for item in scored.trained if named or item.prompt.dataset == name]
                metrics |= {f"eval/{name}/{key}": value for key, value in _metrics(own).items()}
            more = {} if one.name is None else {"benchmark": one.name}
            rows += [more | completion_row(item, step) for item in scored.trained]
        return metrics | plain_means(metrics), rows

    def _scored(self, one: EvalSet, step: int, unwanted: Callable[[], bool]) -> ScoredRound | None:
        """The completions of a set and their rewards, on rank 0. Collective."""
        sampler = self.sampler
        args = self.sampler.args

        def look() -> None:
            if sampler.ranks.max(float(unwanted())):
                raise EvaluationLeft

        groups = [
            GroupRequest.of(
                prompt,
                f"{sampler.run_id}/eval/{step}/{prompt.prompt_id}",
                evaluation_seeds(args.seed, prompt.prompt_id, one.num_generations),
                one.sampling,
            )
            for prompt in one.prompts
        ]
        at_once = one.num_prompts  # a server orders its requests itself
        if not args.use_vllm:
            at_once = max(
                1, args.per_device_eval_batch_size * sampler.ranks.world_size // one.num_generations
            )
        scoring = sampler.generate(groups, one.num_prompts, at_once, one.gradings, step, look=look)
        return None if scoring is None else scoring.result()


def plain_means(metrics: Mapping[str, float]) -> Metrics:
    """`eval/mean/...` of several sets: accuracy, reward and length, each set counting the same; nothing for one set."""
    found: dict[str, list[float]] = {}
    for name, value in metrics.items():
        key = name.split("/", 2)[2]
        if key in _AVERAGED:
            found.setdefault(key, []).append(value)
    return {f"eval/{MEAN}/{key}": mean(values) for key, values in found.items() if len(values) > 1}


def _metrics(scored: Sequence[Trajectory]) -> Metrics:
    """The figures of one benchmark: those of the run's steps, and those of `swift eval`."""
    reward = next(iter(scored[0].rewards))
    result = summarize([_graded(item, reward) for item in scored], reward)
    values = {"reward": reward_metrics(scored, [])["reward"]} | completion_metrics(scored)
    values["accuracy"] = result.average.value
    for name in scored[0].rewards:
        found = (item.rewards[name] for item in scored)
        values[f"rewards/{name}/mean"] = mean(
            [one for one in found if one is not None and not math.isnan(one)]
        )
    return (
        values
        | result.flat()
        | {"completions": float(len(scored)), "prompts": float(result.questions)}
    )


def _graded(trajectory: Trajectory, reward: str) -> Graded:
    """An invalid reward is none: it is not right."""
    value = trajectory.rewards[reward]
    rule = RULES.get(reward)
    return Graded(
        prompt_id=trajectory.prompt.prompt_id,
        reward=None if value is None or math.isnan(value) else value,
        answer=rule.read(trajectory.text) if rule is not None else None,
        tokens=trajectory.length,
        truncated=trajectory.finish_reason == "length",
    )


def _tasks(args: RunFlags) -> Sequence[EvalTask]:
    """Returns the tasks of `--eval_datasets`, where something is evaluated."""
    return args.eval_tasks() if args.evaluates else ()


def eval_rewards(args: RunFlags) -> list[str]:
    """Reward functions that only the evaluation needs."""
    named = [task.reward for task in _tasks(args) if task.reward is not None]
    return [name for name in dict.fromkeys(named) if name not in args.reward_funcs]


def load_eval_prompts(
    args: RunFlags, tokenizer: PreTrainedTokenizerBase, training: Sequence[Row]
) -> list[list[Prompt]]:
    """The prompts of each of a task's `--eval_datasets`, in their order; says where its training rows have some of them
    too. Raises UsageError for data or a row that cannot be used."""
    found = []
    flags = args.data_flags
    for task in _tasks(args):
        questions = load_questions(task, flags)
        shared = shared_questions(
            questions, [] if args.streaming else islice(training, _MOST_COMPARED)
        )
        if shared:
            _logger.warning(
                "%d of the %d questions of %s are in the training rows too",
                shared,
                len(questions.rows),
                task.name,
            )
        found.append(prompts_of(questions, tokenizer, None, args.model))
    return found


def eval_sets(
    tasks: Sequence[Task],
    sampling: Mapping[str, SamplingParams],
    prompts: Sequence[Sequence[Prompt]],
    sizes: Sequence[int],
    open_rewards: Callable[[Sequence[str]], OpenRewards | None],
    model_length: int | None,
) -> list[EvalSet]:
    """The sets of every rank.

    Args:
        prompts: of each task the held-out ones and those of each of `--eval_datasets`; all empty except on rank 0.
        sizes: how many of each rank 0 has.
        open_rewards: of the functions with these names; None except on rank 0.
        model_length: the most tokens that a prompt and its completion may have; None for no limit.

    Raises UsageError: a prompt leaves no room for its completion, or two sets have the same name.
    """
    found: list[EvalSet] = []
    coming = zip(prompts, sizes, strict=True)
    for task in tasks:
        own = list(islice(coming, 1 + len(_tasks(task.args))))
        found += _sets_of(task, sampling[task.name], own, open_rewards, model_length)
    names = [name for one in found for name in one.names()]
    for name in sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"two evaluated data sets have the name {name}: name one otherwise in --eval_datasets"
        )
    if MEAN in names and len(names) > 1:
        raise UsageError(
            f"an evaluated data set has the name {MEAN}, which the mean of all of them has: name it otherwise"
        )
    return found


def _sets_of(
    task: Task,
    sampling: SamplingParams,
    prompts: Sequence[tuple[Sequence[Prompt], int]],
    open_rewards: Callable[[Sequence[str]], OpenRewards | None],
    model_length: int | None,
) -> list[EvalSet]:
    """Returns the sets of one task, as `eval_sets`; `prompts` have their numbers beside them."""
    args = task.args
    held_out = EvalTask(
        name="held out",
        dataset="",
        num_generations=args.num_generations_eval or args.num_generations,
        temperature=float(args.eval_temperature or 0.0),
        top_p=args.eval_top_p,
        max_completion_length=int(args.eval_max_completion_length or args.max_completion_length),
    )
    found: list[EvalSet] = []
    for asked, (own, size) in zip([held_out, *_tasks(args)], prompts, strict=True):
        if not size:
            continue
        if own and asked is not held_out:
            check_room(asked, own, model_length)
        # A set may have another template than training, so that its turns end with another token.
        ends = {
            *sampling.stop_token_ids,
            *(one.turn_end for one in own[:1] if one.turn_end is not None),
        }
        limits = {
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "structured_outputs_regex": None,
            "max_tokens": asked.max_completion_length,
            "stop_token_ids": tuple(sorted(ends)),
        }
        opened = open_rewards(args.reward_funcs if asked.reward is None else [asked.reward])
        weights = args.reward_weights or () if asked.reward is None else (1.0,)
        gradings = None
        if opened is not None:
            gradings = {task.name: Grading(opened, Composition(weights), args.counts_by_turns)}
        found.append(
            EvalSet(
                name=(task.name or None) if asked is held_out else asked.name,
                prompts=[replace(one, task=task.name) for one in own],
                num_prompts=size,
                num_generations=asked.num_generations,
                sampling=sampling.model_copy(update=limits),
                gradings=gradings,
            )
        )
    return found
