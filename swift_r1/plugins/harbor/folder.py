"""A task's folder: what is in it, and what is wrong with it as far as that shows before it runs."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from swift_r1.errors import UsageError, for_each, one_line
from swift_r1.plugins.harbor.recipe import Copied, Recipe, files_in, read_recipe
from swift_r1.plugins.harbor.settings import Settings
from swift_r1.runtime.files import read_text

HOST = "host"
"""The image that is this machine's own programs, which every sandbox of ours can be made of."""
_MARKS = ("task.toml", "instruction.md")

RootOf = Callable[[str], str | None]
"""Returns what a sandbox is made of for the name of an image; None where it cannot be made."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task.

    Attributes:
        path: its folder.
        instruction: what the model reads.
        image: the prepared root that its sandbox begins with, as the sandbox knows it.
        recipe: what is done to that before the model begins.
        workdir: where commands run.
    """

    path: Path
    instruction: str
    image: str
    recipe: Recipe
    workdir: str
    settings: Settings

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def environment(self) -> Path:
        return self.path / "environment"

    @property
    def tests(self) -> Path:
        return self.path / "tests"

    @property
    def solution(self) -> Path | None:
        """Returns the folder of the solution, where there is one."""
        folder = self.path / "solution"
        return folder if (folder / "solve.sh").is_file() else None


def task_folders(suite: Path) -> list[Path]:
    """Returns the folders of a suite's tasks, in the order of their names; of a single task its own. Raises UsageError
    where there is none, and for folders that are no task's."""
    if not suite.is_dir():
        raise UsageError(f"--env harbor:{suite}: there is no such folder")
    if _is_task(suite):
        return [suite]
    folders = sorted(
        path for path in suite.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not any(map(_is_task, folders)):
        raise UsageError(
            f"--env harbor:{suite}: no folder in it is a task, with {' and '.join(_MARKS)}"
        )
    return folders


def read_tasks(folders: Sequence[Path], root_of: RootOf) -> list[HarborTask]:
    """Reads tasks. Raises UsageError with the faults of all of them."""
    return for_each(folders, lambda folder: read_task(folder, root_of))


def read_task(folder: Path, root_of: RootOf) -> HarborTask:
    """Reads a task. Raises UsageError."""
    for name in (*_MARKS, "tests/test.sh"):
        if not (folder / name).is_file():
            raise UsageError(f"{folder}: it has no {name}")
    instruction = _text(folder / "instruction.md").strip()
    if not instruction:
        raise UsageError(f"{folder / 'instruction.md'}: it is empty")
    settings = _settings(folder / "task.toml")
    for part in ("environment", "tests", "solution"):
        for _ in files_in(folder / part):  # links are refused
            pass
    recipe, image = _recipe(folder, settings, root_of)
    return HarborTask(
        path=folder,
        instruction=instruction,
        image=image,
        recipe=recipe,
        workdir=settings.environment.workdir or recipe.workdir,
        settings=settings,
    )


def _is_task(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def _settings(path: Path) -> Settings:
    try:
        return Settings.model_validate(tomllib.loads(_text(path)))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise UsageError(f"{path}: {one_line(error)}") from error


def _recipe(folder: Path, settings: Settings, root_of: RootOf) -> tuple[Recipe, str]:
    """Returns what is done to an image, and that image's root."""
    prebuilt = settings.environment.docker_image
    dockerfile = folder / "environment" / "Dockerfile"
    for name in ("docker-compose.yaml", "docker-compose.yml", ".dockerignore"):
        if dockerfile.with_name(name).exists():
            raise UsageError(f"{dockerfile.with_name(name)}: not supported by --env harbor")
    if prebuilt is not None and (root_of(prebuilt) is not None or not dockerfile.is_file()):
        where = f"{folder / 'task.toml'}: docker_image"
        return Recipe(prebuilt), _root(prebuilt, root_of, where)
    if not dockerfile.is_file():
        raise UsageError(
            f"{folder}: it has neither environment/Dockerfile nor docker_image in task.toml"
        )
    recipe = read_recipe(_text(dockerfile), str(dockerfile))
    for step in recipe.steps:
        if isinstance(step, Copied):
            for _ in step.files(dockerfile.parent):
                pass
    return recipe, _root(recipe.image, root_of, f"{dockerfile}: FROM")


def _root(image: str, root_of: RootOf, where: str) -> str:
    root = root_of(image)
    if root is None:
        raise UsageError(
            f'{where} {image}: no image is built or fetched: --env_args \'{{"images": {{"{image}": "FOLDER"}}}}\' '
            f"names its prepared root, {HOST} is this machine's own programs"
        )
    return root


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: it is not UTF-8") from error
