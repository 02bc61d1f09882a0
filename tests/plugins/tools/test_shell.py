"""The tool `shell`: a sandbox for each conversation, which lives from call to call and ends with it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest

from swift_r1.data.tool_registry import described, tools
from swift_r1.errors import UsageError
from swift_r1.plugins.tools.calling import ToolAnswer
from swift_r1.plugins.tools.parsing import ToolCall
from swift_r1.plugins.tools.pool import ToolLimits, ToolPool
from swift_r1.plugins.tools.shell import ShellEpisode, ShellTools
from swift_r1.sandboxes.base import SandboxError, SandboxLimits, SandboxSpec
from swift_r1.sandboxes.local import sandbox
from tests.plugins.tools.test_scheduler import ARGS

LIMITS = ToolLimits(1.0, 100)


@pytest.fixture(scope="module")
def shells() -> Iterator[ShellTools]:
    spec = SandboxSpec(limits=SandboxLimits(processes=20, disk_bytes=1 << 20))
    with ShellTools("local", spec, LIMITS) as made:
        try:
            made.check()
        except UsageError as error:
            pytest.skip(str(error))
        yield made
    sandbox._machines.clear()


def answer(episode: ShellEpisode, command: str) -> ToolAnswer:
    return asyncio.run(episode.call("shell", json.dumps({"command": command})))


def test_a_conversation_has_one_machine_to_its_end(shells: ShellTools) -> None:
    mine, other = shells.episode(), shells.episode()
    assert answer(mine, "echo 1 > file; sleep 1000 & echo begun").content == "begun\n"
    assert answer(mine, "cat file; pgrep sleep > /dev/null").content == "1\n"
    there = answer(other, "cat file")
    assert (there.outcome, there.cause) == ("answer", None)
    assert there.content == "cat: file: No such file or directory\n\n[exit code 1]"
    late = answer(mine, "echo first; sleep 30")
    assert (late.outcome, late.content) == (
        "timeout",
        "first\n\nError: not done within 1 s, and killed",
    )
    cut = answer(mine, "seq 1000")
    assert cut.cut and cut.content.endswith(" [3793 more characters]")
    mine.close()
    deadline = time.monotonic() + 20
    while len(shells.open) > 1:
        assert time.monotonic() < deadline
    closed = answer(mine, "true")
    assert (closed.outcome, closed.content) == ("error", "Error: the sandbox is over: it is closed")
    other.close()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("{", "the arguments are not JSON: "),
        ('{"command": 1}', "the arguments are not a JSON object with the text `command` alone"),
        ('{"command": "x", "also": 1}', "the arguments are not a JSON object with the text"),
        ("[]", "the arguments are not a JSON object"),
        ("[" * 100_000, "the arguments are not JSON: "),
    ],
)
def test_bad_arguments_are_said(arguments: str, why: str, shells: ShellTools) -> None:
    said = asyncio.run(shells.episode().call("shell", arguments))
    assert said.outcome == "error" and said.content.startswith(f"Error: {why}")
    assert said.cause is None  # of the model, not to be logged


def test_calls_of_a_turn_run_in_the_conversations_own(shells: ShellTools) -> None:
    pool = ToolPool(ARGS, LIMITS, list)
    episode = shells.episode()
    calls = [ToolCall(str(n), "shell", json.dumps({"command": f"echo {n}; ls"})) for n in range(2)]
    said = asyncio.run(pool.call(calls, ["shell"], [episode]))
    assert [one.content for one in said] == ["0\n", "1\n"]
    assert asyncio.run(pool.call(calls[:1], ["other"], [episode]))[0].outcome == "unknown"
    episode.close()


def test_it_is_described_and_gives_way_to_a_plugins_own(shells: ShellTools) -> None:
    about = described("shell")["function"]
    assert about["name"] == "shell" and about["parameters"]["required"] == ["command"]
    episode = shells.episode()
    tools["shell"] = lambda command: command
    assert episode.names() == []


def test_no_sandbox_is_said_before_a_run() -> None:
    with (
        ShellTools("local", SandboxSpec("/missing"), LIMITS) as shells,
        pytest.raises(UsageError, match="--tools shell: the image /missing is neither 'host'"),
    ):
        shells.check()


def test_a_sandbox_that_broke_is_an_error_with_a_cause(
    shells: ShellTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = shells.episode()

    def breaks(command: str, seconds: float) -> None:
        raise SandboxError("the sandbox broke: it ended")

    answer(episode, "true")
    monkeypatch.setattr(episode._box, "exec", breaks)
    said = answer(episode, "true")
    assert (said.content, said.cause) == (
        "Error: the sandbox broke: it ended",
        "shell: the sandbox broke: it ended",
    )
    episode.close()
