"""The process that episodes are forked from."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from swift_r1.rollout.agents.parent import Order
from swift_r1.rollout.agents.processes import AgentProcesses, EpisodeExit, client_environment
from tests.conftest import until
from tests.rollout.agents.conftest import PLUGIN, Stage


def test_what_episodes_have_started_ends_where_the_parent_is_killed(
    stages: Callable[..., Stage],
) -> None:
    stage = stages("misbehaves")
    parent = psutil.Process(stage.processes.pid)
    found: list[psutil.Process] = []

    def children() -> list[psutil.Process]:
        below = parent.children(recursive=True)
        return [one for one in below if any("child of run/" in word for word in one.cmdline())]

    def kill() -> None:
        until(lambda: len(children()) == 2)
        found.extend(children())
        parent.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    [group] = stage.play([{"how": "has a child"}])
    killer.join()
    assert {one.failure for one in group} == {
        "died: the process that agents are forked from was killed"
    }
    until(
        lambda: (
            not [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        )
    )
    [[one]] = stage.play([{}], n=1)
    assert one.failure is None and stage.processes.pid != parent.pid


def ended(command: list[str], kept: Sequence[str] = ()) -> EpisodeExit:
    """An episode of this command alone."""

    async def run() -> EpisodeExit:
        processes = AgentProcesses(Order([str(PLUGIN)], None, command, 1.0, kept))
        await processes.start()
        try:
            return await (await processes.begin({}, {}))[1]
        finally:
            await processes.close()

    return asyncio.run(run())


_STARTS_A_PROCESS = """
import subprocess
from swift_r1 import Agent, agents

shared = subprocess.Popen(["sleep", "600"])

class Tells(Agent):
    async def run(self, client, row):
        own = subprocess.Popen(["sleep", "600"])
        return {"reward": 1.0, "shared": shared.pid, "own": own.pid}

agents["tells"] = Tells
"""


def test_what_a_plugin_starts_for_all_episodes_outlives_each(tmp_path: Path) -> None:
    """As the first process of an environment's sandboxes."""
    plugin = tmp_path / "tells.py"
    plugin.write_text(_STARTS_A_PROCESS)

    environ = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "-"}

    async def run() -> list[EpisodeExit]:
        processes = AgentProcesses(Order([str(plugin)], "tells", None, 1.0, ()))
        await processes.start()
        try:
            told = []
            for _ in range(2):
                told.append(await (await processes.begin(environ, {}))[1])
                pids = json.loads(str(told[-1].result))
                assert psutil.Process(pids["shared"]).status() != psutil.STATUS_ZOMBIE
                assert not psutil.pid_exists(pids["own"])
            return told
        finally:
            await processes.close()

    one, two = asyncio.run(run())
    pids = [json.loads(str(told.result))["shared"] for told in (one, two)]
    assert pids[0] == pids[1]
    until(lambda: not psutil.pid_exists(pids[0]))


@pytest.mark.parametrize(
    ("text", "why"), [("#!/no/such/interpreter", "No such file or dir"), ("true", "Exec format")]
)
def test_a_script_that_the_system_cannot_run(tmp_path: Path, text: str, why: str) -> None:
    script = tmp_path / "agent"
    script.write_text(f"{text}\n")
    script.chmod(0o755)
    found = ended([str(script)])
    assert found.code == 126 and f"{script} cannot be run: {why}" in found.stderr
    assert "its first line (#!) must name a program" in found.stderr.splitlines()[-1]


def test_more_episodes_than_a_process_has_files_for(tmp_path: Path) -> None:
    """Of the parent the limit is raised, of an episode it is what it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # this process may have many; 30 episodes need about 120
    few = len(os.listdir("/proc/self/fd")) + 32
    os.mkfifo(gate := tmp_path / "gate")
    program = ["sh", "-c", f"ulimit -n; touch {tmp_path}/here-$$; read line < {gate}; exit 0"]

    async def run() -> list[EpisodeExit]:
        processes = AgentProcesses(Order([str(PLUGIN)], None, program, 1.0, ()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        try:
            await processes.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            begun = [await processes.begin({}, {}) for _ in range(30)]
            await asyncio.to_thread(until, lambda: len(list(tmp_path.glob("here-*"))) == 30)
            await asyncio.to_thread(gate.write_text, "")
            return await asyncio.gather(*(ended for _, ended in begun))
        finally:
            await processes.close()

    assert {(one.code, one.raised, one.stdout) for one in asyncio.run(run())} == {
        (0, None, f"{few}\n")
    }


def test_claude_code_is_told_what_it_must_not_send() -> None:
    about = client_environment("http://127.0.0.1:1/v1/sessions/a/v1", "key", "policy")
    assert about["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1/v1/sessions/a"
    assert (about["ANTHROPIC_API_KEY"], about["ANTHROPIC_MODEL"]) == ("key", "policy")
    assert about["CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS"] == "1"  # context_management
    assert about["CLAUDE_CODE_EFFORT_LEVEL"] == "unset"  # output_config


def test_the_gateway_is_reached_without_the_proxy_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.com")
    program = [
        "sh",
        "-c",
        'echo "{\\"reward\\": 1, \\"direct\\": \\"$NO_PROXY\\", \\"proxy\\": \\"$HTTP_PROXY\\"}"',
    ]
    kept = ended(program, ["HTTP_PROXY", "NO_PROXY"])
    assert '"direct": "example.com,127.0.0.1", "proxy": "http://127.0.0.1:9"' in kept.stdout
    assert '"direct": "127.0.0.1", "proxy": ""' in ended(program).stdout
