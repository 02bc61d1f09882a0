"""Builds the parts of `swift eval` from its flags, runs it, and says what came out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from swift_r1.arguments.evaluation import EvalArguments
from swift_r1.data.dataset_info import register_dataset_info
from swift_r1.data.types import Prompt
from swift_r1.errors import EXIT_OK, UsageError
from swift_r1.evaluation.engines.base import Engine, Question
from swift_r1.evaluation.engines.choose import open_engine
from swift_r1.evaluation.grading import Grader
from swift_r1.evaluation.model import model_sha256
from swift_r1.evaluation.progress import EvalProgress
from swift_r1.evaluation.questions import Questions, load_all, prompts_of, reward_faults
from swift_r1.evaluation.report import report, results_table
from swift_r1.evaluation.runner import complete, results_of
from swift_r1.evaluation.store import REPORT, Store, open_settings, say, write_whole
from swift_r1.plugins import load_plugins
from swift_r1.rewards.inline import rewards_for
from swift_r1.runtime.libraries import package_versions, quiet_libraries
from swift_r1.runtime.processes import run_folder_held


def run(args: EvalArguments, command: Sequence[str]) -> int:
    """The whole evaluation; what was answered before is not asked again.

    Raises:
        SwiftError: bad data, settings that are not the folder's, an engine or reward that fails.
    """
    quiet_libraries()
    load_plugins(args.external_plugins)
    register_dataset_info(args.custom_dataset_info)
    sets = load_all(args.tasks(), args.seed, args.use_hf)
    faults = [fault for one in sets for fault in reward_faults(one, [str(one.task.reward)], args)]
    if faults:
        raise UsageError(*faults)
    folder = Path(str(args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as cleanup:
        _hold(folder, cleanup)
        engine = open_engine(args, folder)
        cleanup.callback(engine.close)
        questions = [Question(one.task, prompt) for one in sets for prompt in _prompts(one, engine)]
        settings = settings_of(args, sets, engine)
        open_settings(folder, settings)
        counts = {question.key: question.task.num_generations for question in questions}
        store = cleanup.enter_context(Store(folder, counts))
        _answer(args, engine, questions, store, cleanup)
        results = results_of([one.task for one in sets], questions, store)
        served = _weight_versions(store)
        content = report(settings, results, package_versions()) | {"weight_versions": served, "command": list(command)}
        write_whole(folder / REPORT, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    from rich.console import Console

    Console().print(results_table(results, args.model))
    print(f"folder: {folder}")
    return EXIT_OK


def _hold(folder: Path, cleanup: ExitStack) -> None:
    try:
        cleanup.enter_context(run_folder_held(folder, 0.0))
    except UsageError as error:
        raise UsageError(f"another evaluation is at work in {folder}: give another --output_dir") from error


def _answer(
    args: EvalArguments, engine: Engine, questions: Sequence[Question], store: Store, cleanup: ExitStack
) -> None:
    """Asks what is missing."""
    total = sum(question.task.num_generations for question in questions)
    done = sum(len(rows) for rows in store.done.values())
    if done:
        say(f"{done} of {total} completions are there already")
    if done == total:
        return
    names = list(dict.fromkeys(str(question.task.reward) for question in questions))
    pool = cleanup.enter_context(rewards_for(args, names, args.external_plugins))
    pool.wait_ready()
    progress = cleanup.enter_context(EvalProgress(total, done))
    complete(questions, engine, Grader(pool.open), store, progress.advance)


def _prompts(questions: Questions, engine: Engine) -> list[Prompt]:
    return prompts_of(questions, engine.tokenizer, engine.max_model_length)


def _weight_versions(store: Store) -> list[int]:
    """Of the server's weights that wrote completions; more than one is said."""
    found = {row["weight_version"] for rows in store.done.values() for row in rows} - {None}
    if len(found) > 1:
        say(f"the server's weights changed meanwhile: completions are of versions {min(found)} to {max(found)}")
    return sorted(found)


def settings_of(args: EvalArguments, sets: Sequence[Questions], engine: Engine) -> dict[str, Any]:
    """What the completions depend on; a folder goes on only with the same."""
    return {
        "model": args.base_url if args.is_url else args.model,
        "model_sha256": None if args.is_url else model_sha256(args.model),
        "engine": dict(engine.facts),
        "seed": args.seed,
        "stop_words": list(args.stop_words),
        "verifier": args.verifier,
        "tasks": {
            one.task.name: one.task.to_dict() | {"questions": len(one.rows), "sha256": one.sha256} for one in sets
        },
    }
