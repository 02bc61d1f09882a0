"""The whole of `swift eval`: what is missing is generated in a thread, and graded and written down here."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from swift_r1.data.registry import register_dataset_info
from swift_r1.data.sources import DataFlags
from swift_r1.errors import EXIT_OK, RunFailed, UsageError, for_each
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.lab.evaluation.report import report, results_table
from swift_r1.lab.evaluation.server import BenchmarkQuestion, ServedModel, StartedServer, Written
from swift_r1.lab.evaluation.store import (
    REPORT,
    CompletionRow,
    CompletionStore,
    open_settings,
    write_whole,
)
from swift_r1.plugins import load_plugins
from swift_r1.record.console import progress_bar
from swift_r1.rewards.batch import RewardCaller
from swift_r1.rewards.pool import rewards_for
from swift_r1.rewards.types import RIGHT, RewardBatch, reward_batch
from swift_r1.runtime.libraries import package_versions, quiet_libraries
from swift_r1.runtime.processes import run_folder_held, say
from swift_r1.runtime.terminal import Terminal
from swift_r1.training.evaluation.questions import (
    Questions,
    load_questions,
    prompts_of,
    unfit_rewards,
)
from swift_r1.training.evaluation.results import RULES, graded_of, summarize

_LOOK_EVERY_S = 0.5  # so that Ctrl-C is heard while nothing comes
_LINE_EVERY_S = 60.0
_TRAINER_STATE = {"global_step": 0, "max_steps": 0}

_Answered = tuple[BenchmarkQuestion, Sequence[Written]]


def run(args: EvalArguments, command: Sequence[str]) -> int:
    """Does the whole evaluation; what was answered before is not asked again. Raises SwiftError: bad data, settings
    that are not the folder's, a server or reward that fails."""
    quiet_libraries()
    load_plugins(args.external_plugins)
    register_dataset_info(args.custom_dataset_info)
    flags = DataFlags((), seed=args.seed, use_hf=args.use_hf)
    sets = for_each(args.tasks(), lambda task: load_questions(task, flags))
    faults = [fault for one in sets for fault in unfit_rewards(one, [str(one.task.reward)], args)]
    if faults:
        raise UsageError(*faults)
    folder = Path(str(args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as cleanup:
        try:
            cleanup.enter_context(run_folder_held(folder, 0.0))
        except UsageError as error:
            raise UsageError(
                f"another evaluation is at work in {folder}: give another --output_dir"
            ) from error
        server = ServedModel(args) if args.is_url else StartedServer(args, folder / "server.log")
        cleanup.callback(server.close)
        questions = [
            BenchmarkQuestion(one.task, prompt)
            for one in sets
            for prompt in prompts_of(one, server.tokenizer, server.max_model_length, server.folder)
        ]
        settings = _settings(args, sets, server)
        open_settings(folder, settings)
        counts = {question.key: question.task.num_generations for question in questions}
        store = cleanup.enter_context(CompletionStore(folder, counts))
        _answer(args, server, questions, store, cleanup)
        results = {}
        for one in sets:
            asked = [question for question in questions if question.task == one.task]
            graded = [graded_of(row) for question in asked for row in store.done[question.key]]
            results[one.task.name] = summarize(graded, one.task.reward)
        served = _weight_versions(store)
        content = report(settings, results, package_versions()) | {
            "weight_versions": served,
            "command": list(command),
        }
        write_whole(
            folder / REPORT,
            json.dumps(
                content,
                indent=2,
                ensure_ascii=False,
                allow_nan=False,
            )
            + "\n",
        )
    Terminal().print(results_table(results, args.model))
    print(f"folder: {folder}")
    return EXIT_OK


def _answer(
    args: EvalArguments,
    server: ServedModel,
    questions: Sequence[BenchmarkQuestion],
    store: CompletionStore,
    cleanup: ExitStack,
) -> None:
    """Generates and grades what the store lacks; what was done before a failure is written down."""
    total = sum(question.task.num_generations for question in questions)
    done = sum(len(rows) for rows in store.done.values())
    if done:
        say(f"{done} of {total} completions are there already", "eval")
    if done == total:
        return
    names = list(dict.fromkeys(str(question.task.reward) for question in questions))
    rewards = cleanup.enter_context(
        rewards_for(args, names, partial(load_plugins, args.external_plugins))
    )
    rewards.wait_ready()
    bar = cleanup.enter_context(progress_bar(Terminal(stderr=True)))
    said = time.monotonic()
    task = bar.add_task("completions", total=total, completed=done)
    server.start()
    for batch in _generated(
        server, [question for question in questions if question.key not in store.done]
    ):
        for question, rows in _grade(rewards, batch):
            store.add(question.key, rows)
            done += len(rows)
            bar.advance(task, len(rows))
            if bar.disable and time.monotonic() - said >= _LINE_EVERY_S:  # no terminal
                said = time.monotonic()
                say(f"{done} of {total} completions", "eval")
    left = [question.prompt.prompt_id for question in questions if question.key not in store.done]
    if left:
        raise RuntimeError(f"the server left {len(left)} questions out, the first is {left[0]}")


def _generated(
    server: ServedModel, questions: Sequence[BenchmarkQuestion]
) -> Iterator[list[_Answered]]:
    """Yields what the server, in a thread, has completed since the last look; raises what it raises, after the last."""
    arrived: queue.SimpleQueue[_Answered | None] = queue.SimpleQueue()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            server.generate(questions, lambda question, written: arrived.put((question, written)))
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            failures.append(error)
        arrived.put(None)  # the end

    # A daemon: where grading fails, the completions that are still generated are of no use.
    threading.Thread(target=work, name="generation", daemon=True).start()
    over = False
    while not over:
        try:
            items = [arrived.get(timeout=_LOOK_EVERY_S)]
        except queue.Empty:
            continue
        while not arrived.empty():
            items.append(arrived.get())
        over = None in items
        batch = [item for item in items if item is not None]
        if batch:
            yield batch
    if failures:
        raise failures[0]


def _weight_versions(store: CompletionStore) -> list[int]:
    """Returns the weight versions that wrote completions; reports several."""
    versions = {row["weight_version"] for rows in store.done.values() for row in rows}
    if len(versions) > 1:
        say(
            "the server's weights changed meanwhile: completions are of versions "
            f"{min(versions)} to {max(versions)}",
            "eval",
        )
    return sorted(versions)


def _settings(
    args: EvalArguments, sets: Sequence[Questions], server: ServedModel
) -> dict[str, Any]:
    """Returns what the completions depend on; a folder is continued only with the same."""
    return {
        "model": args.base_url if args.is_url else args.model,
        "engine": dict(server.facts),
        "seed": args.seed,
        "stop_words": list(args.stop_words),
        "verifier": args.verifier,
        "tasks": {
            one.task.name: one.task.to_dict() | {"questions": len(one.rows), "sha256": one.sha256}
            for one in sets
        },
    }


def _grade(
    rewards: RewardCaller, answered: Sequence[tuple[BenchmarkQuestion, Sequence[Written]]]
) -> list[tuple[BenchmarkQuestion, list[CompletionRow]]]:
    """Returns the rows of all completions, question by question; RunFailed where a reward could not judge one of
    them."""
    answered = [  # with `--response_prefix`, as rewards see completions in training
        (
            question,
            [replace(one, text=question.prompt.response_prefix + one.text) for one in written],
        )
        for question, written in answered
    ]
    graded: list[tuple[BenchmarkQuestion, list[CompletionRow]]] = []
    for task in {question.task.name: question.task for question, _ in answered}.values():
        own = [one for one in answered if one[0].task == task]
        assert task.reward is not None
        batch = rewards.open(_TRAINER_STATE, (task.reward,))
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
            (
                question,
                [_row(question, index, one, next(values)) for index, one in enumerate(written)],
            )
            for question, written in own
        ]
    return graded


def _row(
    question: BenchmarkQuestion,
    index: int,
    written: Written,
    reward: float | None,
) -> CompletionRow:
    task = question.task
    prompt = question.prompt
    rule = RULES.get(task.reward or "")
    return {
        "benchmark": task.name,
        "prompt_id": prompt.prompt_id,
        "index": index,
        "prompt": prompt.text,
        "completion": written.text,
        "answer": rule.read(written.text) if rule is not None else None,
        "right": reward is not None and reward >= RIGHT,
        "reward": reward,
        "tokens": written.tokens,
        "finish_reason": written.finish_reason,
        "weight_version": written.weight_version,
        "columns": dict(prompt.columns),
    }


def _reward_batch(question: BenchmarkQuestion, written: Sequence[Written]) -> RewardBatch:
    prompt = question.prompt
    count = len(written)
    texts = [one.text for one in written]
    return reward_batch(
        texts,
        [prompt.columns] * count,
        prompt.columns,
        count,
        messages=[
            [*map(dict, prompt.messages), {"role": "assistant", "content": text}] for text in texts
        ],
        prompt_id=[prompt.prompt_id] * count,
        request_id=[f"eval/{prompt.prompt_id}"] * count,
        dataset=[prompt.dataset] * count,
        finish_reason=[one.finish_reason for one in written],
    )
