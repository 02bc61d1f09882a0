"""What `swift eval` asks of whoever writes the completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swift_r1.arguments.eval_tasks import Task
from swift_r1.data.types import Prompt
from swift_r1.wire.protocol import RolloutRequest, SamplingParams, completion_seed


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of a task; it is asked `task.num_generations` times."""

    task: Task
    prompt: Prompt

    @property
    def key(self) -> tuple[str, str]:
        return self.task.name, self.prompt.prompt_id


@dataclass(frozen=True, slots=True)
class Written:
    """One completion. `tokens` and `weight_version` are None where the endpoint does not tell."""

    text: str
    tokens: int | None
    finish_reason: str
    weight_version: int | None = None


OnWritten = Callable[[Question, Sequence[Written]], None]
"""Given all completions of a question, in the order of their seeds; called from the thread that generates."""


class Engine(Protocol):
    """Writes completions.

    Attributes:
        facts: what the completions depend on, for the report: a folder goes on only with the same.
        max_model_length: tokens of prompt and completion; None where it is not known.
        tokenizer: None where the other end renders the prompts.
    """

    facts: Mapping[str, Any]
    max_model_length: int | None
    tokenizer: Any

    def start(self) -> None:
        """Loads what has to be loaded; not called where nothing is left to write.

        Raises:
            SwiftError: it cannot.
        """

    def generate(self, questions: Sequence[Question], on_written: OnWritten) -> None:
        """Completions of all questions, each question's as soon as all of them are there.

        Raises:
            SwiftError: one could not be had; those of other questions were handed over.
        """

    def close(self) -> None: ...


def seeds_of(seed: int, question: Question) -> tuple[int, ...]:
    """One seed a completion: of the question and its number, so that an evaluation in training has the same."""
    return evaluation_seeds(seed, question.prompt.prompt_id, question.task.num_generations)


def evaluation_seeds(seed: int, prompt_id: str, n: int) -> tuple[int, ...]:
    return tuple(completion_seed(seed, "eval", prompt_id, index) for index in range(n))


def request_of(
    question: Question, request_id: str, seed: int, stop: Sequence[str], stop_token_ids: Sequence[int] = ()
) -> RolloutRequest:
    """The question as token ids for an engine that takes them; its template's end of a turn ends it too."""
    task, end = question.task, question.prompt.turn_end
    return RolloutRequest(
        request_id=request_id,
        prompt_token_ids=question.prompt.token_ids,
        n=task.num_generations,
        seeds=seeds_of(seed, question),
        sampling=SamplingParams(
            max_tokens=task.max_completion_length,
            temperature=task.temperature,
            top_p=task.top_p,
            stop=tuple(stop),
            stop_token_ids=(*stop_token_ids, *(() if end is None else (end,))),
        ),
    )
