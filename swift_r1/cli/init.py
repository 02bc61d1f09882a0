"""`swift init`: a starter, a recipe or a plugin that comes with the package, in a folder to begin from."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from swift_r1.cli import check as check_command
from swift_r1.cli.files import naming
from swift_r1.errors import EXIT_OK, UsageError, no_such
from swift_r1.flags.fields import flag
from swift_r1.flags.parser import Command, parse_arguments

STARTERS = {
    "maths": "answers with a right number",
    "format": "answers in a given form",
    "code": "programs that pass tests",
    "judge": "texts that another model judges",
    "agent": "conversations with a program, which it asks for what it needs",
}
_CHECKS = {  # dataset and rewards, and other flags
    "maths": ("problems", "right_number"),
    "format": ("texts", "wanted_json"),
    "code": ("tasks", "code", "one_block"),
    "judge": ("wishes", "short"),  # without the judge, which the check would ask: none runs yet
    "agent": ("orders", "right_total", "--agent", "buyer"),
}
BUNDLED = Path(__file__).parent / "bundled"  # in a checkout links to its examples/ and plugins/
_STARTERS = Path(__file__).parent / "starters"
_NAMED = re.compile(r"\b(?:examples|plugins)/\w+(?:\.py)?")


@dataclass(frozen=True, kw_only=True)
class InitArguments(Command):
    """Init."""

    command: ClassVar[str] = "init"
    words: list[str] = flag([], "what to write, and into which folder", positional=True)
    model: str = flag("Qwen/Qwen2.5-0.5B-Instruct", "folder or hub id of a starter's model")


_USAGE = """swift init [NAME [FOLDER]] [--model M]

Without NAME: lists what there is. With it, into FOLDER (default: the current folder):
- a starter: plugin.py with a dataset and a reward, data.jsonl with a dozen rows, and run.yaml with the flags of the
  model M. Then it checks them, without loading a model.
- a recipe or a plugin, with all that it uses, below examples/ and plugins/ there.
An existing file with other content is never overwritten."""
_EXAMPLES = """
swift init maths my-task --model Qwen/Qwen2.5-0.5B-Instruct
swift init gsm8k_ppo my-recipes
"""
HELP = (_USAGE, InitArguments, _EXAMPLES)


def run(words: Sequence[str]) -> int:
    """Runs the command; of a starter its exit code is the check's. Raises UsageError: there is no such name, another
    file is there, or the folder cannot be written."""
    args = parse_arguments(InitArguments, words)
    known = recipes()
    if not args.words:
        _list(known)
        return EXIT_OK
    if len(args.words) > 2:
        raise UsageError(f"swift init NAME FOLDER, not: swift init {shlex.join(args.words)}")
    name = Path(args.words[0].rstrip("/")).stem
    folder = Path(*args.words[1:])
    if name in STARTERS:
        return _begin(name, folder, args.model)
    if name not in known:
        raise UsageError(no_such("starter, recipe or plugin", name, [*STARTERS, *known]))
    for place in copy(known[name], folder):
        print(folder / place)
    print(f"its commands are for {shlex.quote(str(folder.resolve()))}")
    return EXIT_OK


def _list(known: Mapping[str, str]) -> None:
    print("starters:")
    for name, what in STARTERS.items():
        print(f"  {name:<24}{what}")
    for top in ("examples", "plugins"):
        print(f"{top}:")
        for name, place in known.items():
            if place.startswith(top):
                print(f"  {name:<24}{_line(place)}")
    print("\n`swift init NAME FOLDER` writes one into a folder.")


def _begin(task: str, folder: Path, model: str) -> int:
    """Writes a starter and checks it."""
    here = Path(model).expanduser()
    if model.startswith((".", "/", "~")) and not here.is_dir():
        raise UsageError(f"--model {model}: there is no such folder")
    print(f"{folder}: {', '.join(write_starter(folder, task, model))}")
    dataset, *rewards = _CHECKS[task]
    check = ["--external_plugins", "plugin.py", "--dataset", dataset, "--reward_funcs", *rewards]
    print("swift check", shlex.join(check), flush=True)
    with chdir(folder):
        code = check_command.run(check)
    if code == EXIT_OK:
        judge = ", with the judge of judge.yaml running" if task == "judge" else ""
        enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}; "
        print(f"next: {enter}swift rlhf run.yaml{judge}")
    return code


def write_starter(folder: Path, task: str, model: str) -> list[str]:
    """Writes the files of a starter; returns their names. Raises UsageError as `_write`."""
    here = Path(model).expanduser()
    texts = {
        file.name: file.read_text(encoding="utf-8")
        for file in sorted((_STARTERS / task).iterdir())
        if file.is_file()
    }
    flags = texts.pop("flags.yaml").rstrip()
    run = (_STARTERS / "run.yaml").read_text(encoding="utf-8")
    named = json.dumps(str(here.resolve()) if here.is_dir() else model)
    texts["run.yaml"] = run.format(model=named, task=flags)
    _write(folder, {name: text.encode() for name, text in texts.items()})
    return list(texts)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Raises UsageError, before anything is written, where another file is in one of these places; and where the folder
    cannot be written."""
    with naming(f"{folder} cannot be written"):
        others = [
            place
            for place, content in files.items()
            if (folder / place).exists() and (folder / place).read_bytes() != content
        ]
        if others:
            raise UsageError(
                f"{folder} holds other files already: {', '.join(others)}: name another folder"
            )
        for place, content in files.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_bytes(content)


def recipes() -> dict[str, str]:
    """Returns the place of each recipe, then of each plugin, by name: `examples/gsm8k_ppo` or `plugins/countdown.py`, as
    commands name it."""
    return {
        path.stem: f"{top}/{path.name}"
        for top in ("examples", "plugins")
        for path in sorted((BUNDLED / top).iterdir())
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
    }


def copy(place: str, folder: Path) -> list[str]:
    """Copies a recipe or plugin with all that it uses; returns the places of its files in `folder`. Raises UsageError as
    `_write`."""
    places = [file for used in _with_all_it_uses(place) for file in _files(used)]
    _write(folder, {file: (BUNDLED / file).read_bytes() for file in places})
    for file in places:
        (folder / file).chmod((BUNDLED / file).stat().st_mode)  # scripts can be run
    return places


def _with_all_it_uses(place: str) -> list[str]:
    """Returns the place and those that its files name, and so on."""
    known = set(recipes().values())
    found = [place]
    for one in found:
        for file in _files(one):
            named = _NAMED.findall((BUNDLED / file).read_text(encoding="utf-8"))
            found += [other for other in dict.fromkeys(named) if other in known - set(found)]
    return found


def _files(place: str) -> Iterator[str]:
    """Yields the places of the files of a recipe or plugin."""
    top = BUNDLED / place
    for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
        if path.is_file() and path.suffix != ".pyc":
            yield path.relative_to(BUNDLED).as_posix()


def _line(place: str) -> str:
    """Returns what it is: the heading of its README.md, else the first sentence of its Python file."""
    readme = BUNDLED / place / "README.md"
    if readme.is_file():
        return readme.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    (file,) = (file for file in _files(place) if file.endswith(".py"))
    docstring = ast.get_docstring(ast.parse((BUNDLED / file).read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", first)[0].removesuffix(".")
