"""What a task folder says, and the one line for each that is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_r1.errors import UsageError
from swift_r1.plugins.harbor.folder import read_task, read_tasks, task_folders
from tests.plugins.harbor.suites import TASK, write_task

HERE = {"host": "host"}.get


def test_a_task(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "one"), HERE)
    assert (task.name, task.image, task.workdir) == ("one", "host", "/app")
    assert task.instruction == "Write the word hello into hello.txt."
    assert task.recipe.env == {"COLOUR": "red"}
    assert task.settings.environment.memory_bytes == 512 << 20
    assert task.settings.agent.timeout_sec == 20.0 and task.solution == tmp_path / "one/solution"
    without = read_task(write_task(tmp_path / "two", {"solution/solve.sh": None}), HERE)
    assert without.solution is None


def test_an_image_that_is_prepared(tmp_path: Path) -> None:
    """`docker_image` is the built Dockerfile: where its root is there, nothing is built."""
    settings = '[environment]\ndocker_image = "some/thing:1"\nworkdir = "/w"\nmemory = "2G"\nallow_internet = false\n'
    folder = write_task(tmp_path / "one", {"task.toml": settings})
    built = read_task(folder, HERE)
    assert (built.image, len(built.recipe.steps)) == ("host", 2)
    prepared = read_task(folder, {"some/thing:1": "/roots/thing"}.get)
    assert (prepared.image, prepared.recipe.steps, prepared.workdir) == ("/roots/thing", [], "/w")
    assert prepared.settings.environment.memory_bytes == 2 << 30
    assert not prepared.settings.environment.wants_network
    (folder / "environment" / "Dockerfile").write_text("FROM debian:12\n")
    assert read_task(folder, {"debian:12": "/roots/12"}.get).image == "/roots/12"


TOML = str(TASK["task.toml"])
BROKEN = {
    "no instruction": ({"instruction.md": None}, "one: it has no instruction.md"),
    "no environment": (
        {"environment/Dockerfile": None},
        "one: it has neither environment/Dockerfile nor docker_image in task.toml",
    ),
    "says nothing": ({"instruction.md": " \n"}, "instruction.md: it is empty"),
    "no TOML": ({"task.toml": "[agent\n"}, "task.toml: Expected ']' at the end of a table"),
    "no number": (
        {"task.toml": '[agent]\ntimeout_sec = "soon"\n'},
        "task.toml: agent.timeout_sec: Input should be a valid number",
    ),
    "several steps": (
        {"task.toml": TOML + '[[steps]]\nname = "a"\n'},
        "task.toml: Value error, steps: not supported by --env harbor",
    ),
    "a GPU": (
        {"task.toml": TOML + "gpus = 1\n"},
        "task.toml: environment: Value error, gpus: not supported by --env harbor",
    ),
    "some hosts": (
        {"task.toml": TOML + 'network_mode = "allowlist"\n'},
        "task.toml: environment.network_mode: Input should be 'public' or 'no-network'",
    ),
    "a secret": (
        {"task.toml": '[verifier]\nenv = {KEY = "${KEY}"}\n'},
        "task.toml: verifier.env: Value error, KEY refers to a variable of this machine",
    ),
    "another root": (
        {"environment/Dockerfile": "FROM python:3.11\n"},
        "environment/Dockerfile: FROM python:3.11: no image is built or fetched: --env_args "
        '\'{"images": {"python:3.11": "FOLDER"}}\' names its prepared root',
    ),
    "no such file": (
        {"environment/Dockerfile": "FROM host\nCOPY x /\n"},
        "Dockerfile:2: there is no x",
    ),
    "services": ({"environment/docker-compose.yaml": ""}, "docker-compose.yaml: not supported"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_that_is_broken(name: str, tmp_path: Path) -> None:
    changes, said = BROKEN[name]
    folder = write_task(tmp_path / "one", changes)
    with pytest.raises(UsageError) as caught:
        read_task(folder, HERE)
    (fault,) = caught.value.faults
    assert fault.startswith(str(folder)) and said in fault and "\n" not in fault


@pytest.mark.parametrize("place", ["environment/files/l", "environment/l", "tests/l", "solution/l"])
def test_a_link_is_not_followed(place: str, tmp_path: Path) -> None:
    """It might bring a file of this machine to the model."""
    folder = write_task(tmp_path / "one")
    (folder / place).symlink_to("/etc")
    with pytest.raises(UsageError, match=f"{place}: a link in a task folder is not followed"):
        read_task(folder, HERE)


def test_a_suite(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / name)
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").touch()
    assert [path.name for path in task_folders(tmp_path)] == ["a", "b"]
    assert task_folders(tmp_path / "a") == [tmp_path / "a"]
    (tmp_path / "c").mkdir()
    write_task(tmp_path / "d", {"tests/test.sh": None})
    with pytest.raises(UsageError) as caught:  # of all that are broken
        read_tasks(task_folders(tmp_path), HERE)
    assert caught.value.faults == (
        f"{tmp_path}/c: it has no task.toml",
        f"{tmp_path}/d: it has no tests/test.sh",
    )
    with pytest.raises(
        UsageError, match=r"no folder in it is a task, with task\.toml and instruction\.md"
    ):
        task_folders(tmp_path / "c")
    with pytest.raises(UsageError, match="there is no such folder"):
        task_folders(tmp_path / "z")
