"""`swift init`: a folder to start from, with a plugin, data and flags that pass the check."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import chdir
from dataclasses import dataclass
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import ClassVar

from swift_r1.cli import check as check_command
from swift_r1.cli.files import naming
from swift_r1.errors import EXIT_OK, UsageError
from swift_r1.flags.fields import flag
from swift_r1.flags.parser import Command, parse_arguments

TASKS = {
    "maths": "answers with a right number",
    "format": "answers in a given form",
    "code": "programs that pass tests",
    "judge": "texts that another model judges",
    "agent": "conversations with a program, which it asks for what it needs",
}


@dataclass(frozen=True, kw_only=True)
class InitArguments(Command):
    """Init."""

    command: ClassVar[str] = "init"
    folder: list[str] = flag([], "the folder to make", positional=True)
    task: str | None = flag(None, "what the model is to learn", choices=tuple(TASKS))
    model: str | None = flag(None, "folder or hub id of the model")


_USAGE = """swift init [FOLDER] [--task TASK] [--model M]

Writes a folder to start from: plugin.py with a dataset and a reward, data.jsonl with a dozen rows, and run.yaml with
the flags. Then it checks them, without loading a model. In a terminal it asks for what is missing. Tasks:
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
    task = args.task
    name = "".join(args.folder)
    model = args.model
    if sys.stdin.isatty():
        if task is None:
            for number, (known, what) in enumerate(TASKS.items(), 1):
                print(f"  {number}  {known:<8} {what}")
            task = _asked("What is the model to learn?", next(iter(TASKS)), list(TASKS))
        while not name:
            name = _asked("Into which folder?", _free_name(f"my-{task}"))
            taken = _taken(Path(name), _texts(task))
            if taken:
                print(taken)
                name = ""
        model = model or _asked("Which model (a folder or a hub id)?", _MODEL)
    if task is None or not name:
        raise UsageError(f"swift init FOLDER --task {'|'.join(TASKS)}")
    folder = Path(name)
    model = model or _MODEL
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        raise UsageError(f"--model {model}: there is no such folder")
    here = Path(model).expanduser()
    written = write_starter(folder, task, str(here.resolve()) if here.is_dir() else model)
    dataset, *rewards = _CHECKS[task]
    check = ["--external_plugins", "plugin.py", "--dataset", dataset, "--reward_funcs", *rewards]
    print(f"{folder}: {', '.join(written)}")
    print("swift check", shlex.join(check), flush=True)
    with chdir(folder):
        code = check_command.run(check)
    if code == EXIT_OK:
        judge = ", with the judge of judge.yaml running" if task == "judge" else ""
        enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}; "
        print(f"next: {enter}swift rlhf run.yaml{judge}")
    return code


def _asked(question: str, default: str, choices: Sequence[str] = ()) -> str:
    """Returns the answer, also by its number among `choices`; asked again until it is one of them."""
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


def write_starter(folder: Path, task: str, model: str) -> list[str]:
    """Writes the files of a task; their names. Raises UsageError where one is there already, or the folder cannot be
    written."""
    texts = _texts(task, model)
    taken = _taken(folder, texts)
    if taken:
        raise UsageError(taken)
    with naming(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return sorted(texts)


def _texts(task: str, model: str = "") -> dict[str, str]:
    """Returns the files of a task, by name."""
    starters = files("swift_r1.cli") / "starters"
    texts = {
        file.name: file.read_text(encoding="utf-8")
        for file in (starters / task).iterdir()
        if file.is_file()
    }
    flags = texts.pop("flags.yaml").rstrip()
    run = (starters / "run.yaml").read_text(encoding="utf-8")
    return texts | {"run.yaml": run.format(model=json.dumps(model), task=flags)}


def _taken(folder: Path, names: Iterable[str]) -> str | None:
    """Returns a sentence about the files that are in the way of these."""
    there = [name for name in sorted(names) if (folder / name).exists()]
    return f"{folder} already has {', '.join(there)}: name another folder" if there else None


def _free_name(name: str) -> str:
    """Returns the name, with a number where there is a file or folder of it already."""
    free = name
    numbers = count(2)
    while Path(free).exists():
        free = f"{name}-{next(numbers)}"
    return free
