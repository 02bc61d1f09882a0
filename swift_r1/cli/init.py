"""`swift init`: a folder to start from, with a plugin, data and flags that pass the check."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import chdir
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from swift_r1.arguments.init import TASKS, InitArguments
from swift_r1.arguments.parser import parse_arguments
from swift_r1.cli import check as check_command
from swift_r1.errors import EXIT_OK, UsageError

_USAGE = """swift init [FOLDER] [--task TASK] [--model M]

Writes a folder to start from: plugin.py with a dataset and a reward, data.jsonl with a dozen rows, and run.yaml with
the flags. Then it checks them, without a model. In a terminal it asks for what is not given. Tasks:
""" + "".join(f"\n  {name:<8} {what}" for name, what in TASKS.items())
_EXAMPLES = """
swift init
swift init my-task --task maths --model Qwen/Qwen2.5-0.5B-Instruct
"""
HELP = (_USAGE, InitArguments, _EXAMPLES)
_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_CHECKS = {  # dataset and rewards, and other flags
    "maths": ("problems", "right_number"),
    "format": ("texts", "wanted_json"),
    "code": ("tasks", "code", "one_block"),
    "judge": ("wishes", "short"),  # without the judge, which the check would ask: none runs yet
    "agent": ("orders", "right_total", "--agent", "buyer"),
}


def run(words: Sequence[str]) -> int:
    """Runs the command; its exit code is the check's. Raises UsageError: a flag is missing where nobody can be asked,
    or the folder holds one of the files or cannot be written."""
    args = parse_arguments(InitArguments, words)
    if len(args.folder) > 1:
        raise UsageError(f"one folder, not {len(args.folder)}: {' '.join(args.folder)}")
    task, name, model = args.task, next(iter(args.folder), None), args.model
    if sys.stdin.isatty():
        if task is None:
            for number, (known, what) in enumerate(TASKS.items(), 1):
                print(f"  {number}  {known:<8} {what}")
            task = _asked("What is the model to learn?", next(iter(TASKS)), list(TASKS))
        name = name or _asked("Into which folder?", f"my-{task}")
        model = model or _asked("Which model (a folder or a hub id)?", _MODEL)
    if task is None or name is None:
        raise UsageError(f"swift init FOLDER --task {'|'.join(TASKS)}")
    folder, model = Path(name), model or _MODEL
    write_starter(folder, task, str(Path(model).resolve()) if Path(model).is_dir() else model)
    dataset, *rewards = _CHECKS[task]
    check = ["--external_plugins", "plugin.py", "--dataset", dataset, "--reward_funcs", *rewards]
    print(f"{folder}: {', '.join(sorted(one.name for one in folder.iterdir()))}")
    print("swift check", shlex.join(check), flush=True)
    with chdir(folder):
        code = check_command.run(check)
    if code == EXIT_OK:
        judge = ", with the judge of judge.yaml running" if task == "judge" else ""
        print(f"next: cd {shlex.quote(str(folder))}; swift rlhf run.yaml{judge}")
    return code


def _asked(question: str, default: str, choices: Sequence[str] = ()) -> str:
    """The answer, also by its number among `choices`; asked again until it is one of them."""
    while True:
        try:
            answer = input(f"{question} [{default}] ").strip() or default
        except EOFError as error:
            raise UsageError("no answer: give --task, --model and a folder") from error
        if answer.isdecimal() and 1 <= int(answer) <= len(choices):
            answer = choices[int(answer) - 1]
        if not choices or answer in choices:
            return answer
        print(f"one of {', '.join(choices)}")


def write_starter(folder: Path, task: str, model: str) -> None:
    """Writes the files of a task. Raises UsageError where one is there already, or the folder cannot be written."""
    starters = files("swift_r1") / "starters"
    texts = {one.name: one.read_text(encoding="utf-8") for one in _files(starters / task)}
    flags = texts.pop("flags.yaml")
    texts["run.yaml"] = (
        (starters / "run.yaml").read_text(encoding="utf-8").format(model=json.dumps(model), task=flags.rstrip())
    )
    if there := [name for name in sorted(texts) if (folder / name).exists()]:
        raise UsageError(f"{folder} holds {', '.join(there)} already: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from error


def _files(folder: Traversable) -> list[Traversable]:
    return sorted((one for one in folder.iterdir() if one.is_file()), key=lambda one: one.name)
