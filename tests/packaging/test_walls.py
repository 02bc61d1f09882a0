"""The walls of the house: imports go one way, type-only ones too, and each package stands on a floor of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "swift_r1"
FLOORS = (
    ("errors",),
    ("runtime", "algorithms"),
    ("wire",),
    ("record", "workers"),
    ("sandboxes",),
    ("data",),
    ("rewards",),
    ("plugins",),
    ("flags",),
    ("models",),
    ("sync",),
    ("serving",),
    ("rollout",),
    ("training",),
    ("launch",),
    ("fleet",),
    ("lab",),
    ("cli",),
)
"""A package imports from the floors below its own; nothing from its own floor or above."""
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}
NOT_OURS = ("cli/starters/", "cli/bundled/")  # plugins as their users write them


def modules() -> Iterator[Path]:
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE).as_posix()
        if "/" in inside and not inside.startswith(NOT_OURS):
            yield path


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Returns each module that a file imports anywhere in it, with the line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{name.name}") for name in node.names]
    return found


def package_of(name: str) -> str | None:
    words = name.split(".")
    return words[1] if words[0] == "swift_r1" and len(words) > 1 else None


def test_every_folder_has_a_floor() -> None:
    folders = {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert folders == FLOOR_OF.keys() - {"errors"}
    assert len(folders) <= 19


def test_imports_go_one_way() -> None:
    """Also that the core imports neither `lab` nor `fleet`, which stand above all of it but the command line."""
    wrong = []
    for path in modules():
        own = path.relative_to(PACKAGE).parts[0]
        for line, name in imported(path):
            other = package_of(name)
            if other in FLOOR_OF and other != own and FLOOR_OF[other] >= FLOOR_OF[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {own} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Type-only imports and those within functions count; a package stands for its `__init__.py`."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
        if not path.relative_to(PACKAGE).as_posix().startswith(NOT_OURS)
    }
    # What a file imports from a package's `__init__.py` counts only where no file of it has that name.
    graph = {
        own: {
            name if name in names else name.rpartition(".")[0]
            for _, name in imported(path)
            if {name, name.rpartition(".")[0]} & names.keys()
        }
        - {own}
        for own, path in names.items()
    }
    leaves = True
    while (
        leaves
    ):  # files that import none of those left are in no circle; nor are those that none imports
        used = {name for needed in graph.values() for name in needed}
        leaves = {name for name, needed in graph.items() if not needed or name not in used}
        graph = {name: needed - leaves for name, needed in graph.items() if name not in leaves}
    circle = graph.keys()
    assert not circle, f"in or between circles of imports: {', '.join(sorted(circle))}"


@pytest.mark.parametrize(
    ("package", "foreign"),
    [
        ("algorithms", ("swift_r1", "transformers", "deepspeed", "vllm")),
        ("serving", ("swift_r1.algorithms", "swift_r1.training", "deepspeed")),
        ("rewards", ("torch", "vllm", "deepspeed")),
        ("flags", ("torch", "transformers", "vllm", "deepspeed")),
        ("workers", ("torch", "transformers", "vllm", "deepspeed", "swift_r1.rewards")),
        ("sandboxes", ("torch", "transformers", "numpy", "psutil")),
    ],
)
def test_what_a_package_knows_nothing_of(package: str, foreign: tuple[str, ...]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules()
        if path.relative_to(PACKAGE).parts[0] == package
        for line, name in imported(path)
        for one in foreign
        if f"{name}.".startswith(f"{one}.") and package_of(name) != package
    ]
    assert not wrong, "\n".join(wrong)
