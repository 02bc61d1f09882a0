"""Environments of OpenEnv servers, which run in a Python of their own that has OpenEnv (`make test-agents`)."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swift_r1.errors import UsageError
from swift_r1.launch.checks.environments import check_environment
from swift_r1.plugins.environments.base import adapter
from swift_r1.plugins.environments.chat import EnvironmentGone
from swift_r1.plugins.environments.scripted import MOST_TURNS
from tests.conftest import REPO, free_port, until
from tests.plugins.environments.conftest import FILES, Played

PYTHON = Path(
    os.environ.get("OPENENV_PYTHON", REPO / ".venv-agents" / "openenv" / "bin" / "python")
)
pytestmark = pytest.mark.skipif(
    not PYTHON.is_file(), reason="needs a Python with OpenEnv (OPENENV_PYTHON)"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[[str], str]]:
    processes: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    def start(name: str) -> str:
        if name not in processes:
            port = free_port()
            process = subprocess.Popen([PYTHON, FILES / "openenv_server.py", name, str(port)])
            processes[name] = (process, port)

            def answers() -> bool:
                assert process.poll() is None
                try:
                    return (
                        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status
                        == 200
                    )
                except OSError:
                    return False

            until(answers, 120)
        return f"openenv:http://127.0.0.1:{processes[name][1]}"

    yield start
    for process, _ in processes.values():
        process.kill()
        process.wait(20)


def test_a_tool_made_of_the_action(server: Callable[[str], str], played: Played) -> None:
    row = {"messages": [{"role": "user", "content": "Play."}], "seed": 17}
    calls = [
        ("act", {"number": 5}),
        ("act", {"number": "many"}),
        ("act", {"number": 12}),
        ("act", {"number": 7}),
    ]
    result, model = played(server("guess"), {}, calls, row)
    assert model.requests[0]["messages"][0]["content"] == "Play.\n\nGuess a number from 0 to 9."
    [tool] = model.requests[0]["tools"]
    assert tool["function"]["description"] == "Guesses the number."
    assert list(tool["function"]["parameters"]["properties"]) == ["number"]
    told = [
        message["content"] for message in model.requests[3]["messages"] if message["role"] == "tool"
    ]
    assert told[0] == "higher" and told[2] == "Error: the highest is 9"
    assert told[1].startswith("Error: number: Input should be a valid integer")
    assert result == {
        "reward": pytest.approx(0.9),
        "turn_rewards": [-0.1, 0.0, 0.0, 1.0],
        "last_reward": 1.0,
        "done": 1.0,
        "tool_calls_failed": 2.0,
    }


def test_the_whole_reply_is_a_field(server: Callable[[str], str], played: Played) -> None:
    args = {"reply": "number", "reset": {"offset": 3}}
    result, model = played(server("guess"), args, ["2", "two", "3"])
    assert (
        "tools" not in model.requests[0]
        and model.requests[1]["messages"][-1]["content"] == "higher"
    )
    assert model.requests[2]["messages"][-1]["content"].startswith(
        "Error: number: Input should be a valid integer"
    )
    assert result["reward"] == pytest.approx(0.9) and result["done"] == 1.0
    with pytest.raises(UsageError, match="an action has no field word; there are metadata, number"):
        played(server("guess"), {"reply": "word"}, [])


def test_an_episode_without_an_end_is_cut_off_in_a_check(server: Callable[[str], str]) -> None:
    report = check_environment(server("guess"), {"reply": "number"}, [], 1, 200.0)
    assert not report.faults and report.episodes[0].turns == MOST_TURNS
    assert any("cut off after 250 turns: --max_turns" in note for note in report.notes)


def test_tools_by_mcp(server: Callable[[str], str], played: Played) -> None:
    calls = [("price", {"item": "tea"}), ("price", {"item": "gold"}), "2.5"]
    result, model = played(server("shop"), {}, calls)
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["price"]
    told = [message["content"] for message in model.messages if message["role"] == "tool"]
    assert told[0] == "2.5" and told[1].startswith("Error: ") and "there is no gold" in told[1]
    assert (
        result["done"] == 0.0
        and result["tool_calls_failed"] == 1.0
        and len(result["turn_rewards"]) == 3
    )


def test_rows_name_the_environment(server: Callable[[str], str]) -> None:
    [first, second] = adapter(server("guess"), {}).rows("train", 2)
    assert "Guessing" in first["messages"][0]["content"]
    assert (first["env_row"], second["env_row"]) == ({"seed": 0}, {"seed": 1})


def test_a_server_that_dies_is_nothing_that_the_model_reads(
    server: Callable[[str], str], played: Played
) -> None:
    with pytest.raises(EnvironmentGone, match="the OpenEnv server does not answer"):
        played(server("mortal"), {}, [("act", {"number": 9}), "x"])


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no OpenEnv server answers there"):
        list(adapter(f"openenv:127.0.0.1:{free_port()}", {}).rows("train", 1))
    with pytest.raises(UsageError, match="unknown speed; there are reset, reply, timeout"):
        list(adapter("openenv:127.0.0.1:1", {"speed": 2}).rows("train", 1))
