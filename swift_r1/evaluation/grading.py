"""Completions to rows of `completions.jsonl`: the reward functions grade them, in processes that can be killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swift_r1.errors import RunFailed
from swift_r1.evaluation.engine import Question, Written
from swift_r1.evaluation.results import RIGHT, RULES
from swift_r1.evaluation.store import Row
from swift_r1.rewards.batch import RewardCaller
from swift_r1.rewards.types import RewardBatch

_STATE = {"global_step": 0, "max_steps": 0}


def grade(
    rewards: RewardCaller, answered: Sequence[tuple[Question, Sequence[Written]]]
) -> list[tuple[Question, list[Row]]]:
    """The rows of all completions, question by question.

    Raises:
        RunFailed: a reward function could not judge a completion: without it the figures would not be those of all
            completions.
    """
    answered = [  # with `--response_prefix`, as rewards see completions in training
        (question, [replace(one, text=question.prompt.response_prefix + one.text) for one in written])
        for question, written in answered
    ]
    graded: list[tuple[Question, list[Row]]] = []
    for task in dict.fromkeys(question.task for question, _ in answered):
        own = [one for one in answered if one[0].task == task]
        assert task.reward is not None
        batch = rewards.open(_STATE, (task.reward,))
        for place, (question, written) in enumerate(own):
            batch.add(place, _reward_batch(question, written))
        _, (column,) = batch.result()
        if column.invalid:
            first = column.invalid[0]
            question, _ = own[first.index // task.num_generations]
            raise RunFailed(
                f"{task.name}: the reward {task.reward} cannot judge {len(column.invalid)} of "
                f"{len(column.values)} completions, the first of {question.prompt.prompt_id}: {first.cause}"
            )
        values = iter(column.values)
        graded += [
            (question, [_row(question, index, one, next(values)) for index, one in enumerate(written)])
            for question, written in own
        ]
    return graded


def _row(question: Question, index: int, written: Written, reward: float | None) -> Row:
    task, prompt = question.task, question.prompt
    rule = RULES.get(task.reward or "")
    return {
        "benchmark": task.name,
        "prompt_id": prompt.prompt_id,
        "index": index,
        "prompt": prompt.text or list(map(dict, prompt.messages)),
        "completion": written.text,
        "answer": rule.read(written.text) if rule is not None else None,
        "right": reward is not None and reward >= RIGHT,
        "reward": reward,
        "tokens": written.tokens,
        "finish_reason": written.finish_reason,
        "weight_version": written.weight_version,
        "columns": dict(prompt.columns),
    }


def _reward_batch(question: Question, written: Sequence[Written]) -> RewardBatch:
    prompt, count = question.prompt, len(written)
    texts = [one.text for one in written]
    columns: dict[str, list[Any]] = {name: [value] * count for name, value in prompt.columns.items()}
    columns |= {
        "messages": [[*map(dict, prompt.messages), {"role": "assistant", "content": text}] for text in texts],
        "prompt_id": [prompt.prompt_id] * count,
        "request_id": [f"eval/{prompt.prompt_id}"] * count,
        "dataset": [prompt.dataset] * count,
        "finish_reason": [one.finish_reason for one in written],
        "is_truncated": [one.finish_reason == "length" for one in written],
    }
    return RewardBatch(texts, columns, count)
