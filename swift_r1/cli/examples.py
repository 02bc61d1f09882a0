"""`swift examples`: the recipes and plugins that come with the package, listed and copied."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_r1.cli.files import naming
from swift_r1.errors import EXIT_OK, UsageError, no_such

_USAGE = """swift examples [copy NAME [FOLDER]]

Lists the recipes and plugins that come with the package, or copies one, with those that it uses, to FOLDER/examples and
FOLDER/plugins (default: the current folder). An existing file with other content is never overwritten.

Examples:
  swift examples
  swift examples copy countdown
  swift examples copy gsm8k_ppo my-recipes"""
HELP = (_USAGE,)
BUNDLED = Path(__file__).parent / "bundled"  # in a checkout links to its examples/ and plugins/
_NAMED = re.compile(r"\b(?:examples|plugins)/\w+(?:\.py)?")


@dataclass(frozen=True)
class Example:
    """A folder or a Python file; `place` is `examples/gsm8k_ppo` or `plugins/countdown.py`, as commands name it."""

    place: str

    @property
    def name(self) -> str:
        return Path(self.place).stem

    @property
    def files(self) -> list[str]:
        """The places of its files."""
        top = BUNDLED / self.place
        paths = sorted(top.rglob("*")) if top.is_dir() else [top]
        return [
            path.relative_to(BUNDLED).as_posix()
            for path in paths
            if path.is_file() and path.suffix != ".pyc"
        ]

    @property
    def line(self) -> str:
        """What it is: the heading of its README.md, else the first sentence of its Python file."""
        readme = BUNDLED / self.place / "README.md"
        if readme.is_file():
            return readme.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        (file,) = (file for file in self.files if file.endswith(".py"))
        docstring = ast.get_docstring(ast.parse((BUNDLED / file).read_text(encoding="utf-8"))) or ""
        first = " ".join(docstring.partition("\n\n")[0].split())
        return re.split(r"(?<=\.)\s", first)[0].removesuffix(".")


def run(words: Sequence[str]) -> int:
    """Runs the command. Raises UsageError: no such example, another file is there, or FOLDER cannot be written."""
    known = {example.name: example for example in all_examples()}
    match list(words):
        case []:
            for top in ("examples", "plugins"):
                print(f"{top}:")
                for example in known.values():
                    if example.place.startswith(top):
                        print(f"  {example.name:<24}{example.line}")
            print("\n`swift examples copy NAME [FOLDER]` copies one with all that it uses.")
        case ["copy", name, *rest] if len(rest) <= 1:
            wanted = Path(name.rstrip("/")).stem
            if wanted not in known:
                raise UsageError(no_such("example", wanted, known))
            folder = Path(*rest)
            for place in copy(known[wanted], folder):
                print(folder / place)
            print(f"its commands are for {shlex.quote(str(folder.resolve()))}")
        case other:
            raise UsageError(
                f"swift examples [copy NAME [FOLDER]], not: swift examples {shlex.join(other)}"
            )
    return EXIT_OK


def all_examples() -> Iterator[Example]:
    """Recipes, then plugins, by name."""
    for folder in ("examples", "plugins"):
        for path in sorted((BUNDLED / folder).iterdir()):
            if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
                yield Example(f"{folder}/{path.name}")


def with_all_it_uses(example: Example) -> list[Example]:
    """Returns the example and those that its files name, and so on."""
    known = {entry.place: entry for entry in all_examples()}
    entries = [example]
    for entry in entries:
        for file in entry.files:
            for place in _NAMED.findall((BUNDLED / file).read_text(encoding="utf-8")):
                if place in known and known[place] not in entries:
                    entries.append(known[place])
    return entries


def copy(example: Example, folder: Path) -> list[str]:
    """Copies the example with all that it uses; returns the places of its files in `folder`.

    Raises UsageError, before anything is written, where another file is in one of these places; and where the folder
    cannot be written.
    """
    places = [file for used in with_all_it_uses(example) for file in used.files]
    with naming(f"{folder} cannot be written"):
        others = []
        for place in places:
            path = folder / place
            if path.exists() and path.read_bytes() != (BUNDLED / place).read_bytes():
                others.append(place)
        if others:
            raise UsageError(
                f"{folder} holds other files already: {', '.join(others)}: name another folder"
            )
        for place in places:
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(BUNDLED / place, path)  # with its permissions
    return places
