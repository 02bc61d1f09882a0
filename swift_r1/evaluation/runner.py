"""`swift eval` from questions to a report: what is missing is generated in a thread and graded and written here."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from swift_r1.arguments.eval_tasks import Task
from swift_r1.evaluation.engines.base import Engine, Question, Written
from swift_r1.evaluation.grading import Grader, graded_of
from swift_r1.evaluation.results import Result, summarize
from swift_r1.evaluation.store import Store

_logger = logging.getLogger("swift_r1.evaluation")

_LOOK_EVERY_S = 0.5  # so that Ctrl-C is heard while nothing comes


class _Over:
    """The end of the generation, with what ended it."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def complete(
    questions: Sequence[Question], engine: Engine, grader: Grader, store: Store, advance: Callable[[int], None]
) -> None:
    """Writes the completions of all questions that the store lacks.

    Args:
        advance: told how many more completions are written down.

    Raises:
        SwiftError: the engine or a reward function failed; what was there by then is written down.
    """
    missing = [question for question in questions if question.key not in store.done]
    if not missing:
        return
    engine.start()
    arrived: queue.SimpleQueue[tuple[Question, Sequence[Written]] | _Over] = queue.SimpleQueue()

    def work() -> None:
        error: BaseException | None = None
        try:
            engine.generate(missing, lambda question, written: arrived.put((question, written)))
        except BaseException as caught:  # noqa: BLE001  raised again where it is waited for
            error = caught
        arrived.put(_Over(error))

    # A daemon: where grading fails, nobody waits for completions that nobody wants.
    threading.Thread(target=work, name="generation", daemon=True).start()
    over: _Over | None = None
    while over is None:
        batch: list[tuple[Question, Sequence[Written]]] = []
        for item in _taken(arrived):
            if isinstance(item, _Over):
                over = item
            else:
                batch.append(item)
        for question, rows in grader.grade(batch) if batch else ():
            store.add(question.key, rows)
            advance(len(rows))
    if over.error is not None:
        raise over.error
    left = [question.prompt.prompt_id for question in questions if question.key not in store.done]
    if left:
        raise RuntimeError(f"the engine left {len(left)} questions out, the first is {left[0]}")


def results_of(tasks: Sequence[Task], questions: Sequence[Question], store: Store) -> Mapping[str, Result]:
    """The figures of each benchmark, of all its questions."""
    results = {}
    for task in tasks:
        rows = [row for question in questions if question.task == task for row in store.done[question.key]]
        results[task.name] = summarize([graded_of(row) for row in rows], task.reward)
    return results


def _taken(
    arrived: queue.SimpleQueue[tuple[Question, Sequence[Written]] | _Over],
) -> list[tuple[Question, Sequence[Written]] | _Over]:
    """Everything that is there, at least one; waits for it."""
    items: list[tuple[Question, Sequence[Written]] | _Over] = []
    while not items:
        try:
            items.append(arrived.get(timeout=_LOOK_EVERY_S))
        except queue.Empty:
            continue
    while not arrived.empty():
        items.append(arrived.get())
    return items
