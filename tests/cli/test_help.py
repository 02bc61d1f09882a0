"""Help: grouped, complete, with defaults and what differs from ms-swift."""

import importlib
import shlex
from pathlib import Path

import pytest

from swift_r1.cli.main import COMMANDS, EXAMPLE, main
from swift_r1.flags import RlhfArguments, RolloutArguments
from swift_r1.flags.fields import flag_specs
from swift_r1.flags.parser import parse_arguments


@pytest.mark.parametrize(
    ("command", "cls"), [("rlhf", RlhfArguments), ("rollout", RolloutArguments)]
)
def test_every_flag_is_in_the_help(
    command: str, cls: type, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for spec in flag_specs(cls).values():
        for name in (spec.name, *spec.info.aliases):
            assert f"--{name}" in text
    assert "Examples:" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("command", ["rlhf", "forecast", "rollout", "check", "demo", "init"])
def test_the_first_example_is_a_whole_command(command: str) -> None:
    _usage, cls, examples, *_ = importlib.import_module(f"swift_r1.cli.{command}").HELP
    first = examples.strip().replace("\\\n", " ").splitlines()[0]
    parse_arguments(cls, shlex.split(first)[2:], {})


def test_swift_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    assert "swift-r1" in capsys.readouterr().out.splitlines()[-1]


def test_the_help_is_a_screen_that_begins_with_eight_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 35
    first = [line.split()[1] for line in text.splitlines() if line.startswith("  swift ")]
    assert first[:8] == [*COMMANDS][:8]
    [more] = [line for line in text.splitlines() if line.startswith("  more: ")]
    assert more.split()[1:] == ", ".join([*COMMANDS][8:]).split()
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    assert all(line.strip() in readme for line in EXAMPLE.splitlines())


def test_what_is_registered_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Built in and by plugin files, with a line of help each."""
    files = Path(__file__).resolve().parents[1] / "plugins" / "files"
    assert main(["check", "--registered", "--external_plugins", *map(str, files.glob("*.py"))]) == 0
    lines = dict(
        line.split(maxsplit=1)
        for line in capsys.readouterr().out.splitlines()
        if len(line.split()) > 1 and line.startswith("  ")
    )
    assert {"format", "soft_overlong", "math_tip_trick", "math_env", "difficulty", "wandb"} <= {
        *lines
    }
    assert not any(text.endswith((" the", " those", " more", "Dr.")) for text in lines.values())
    assert lines["v3_boxed"] == "1 where the last boxed number is the solution."
    assert lines["reach"] == "reach a number"
