"""Harbor's task folders: episodes in real sandboxes, what the tests of a task decide, and `swift check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_r1.errors import UsageError
from swift_r1.plugins.environments.base import adapter
from swift_r1.plugins.environments.harbor import ASKED
from tests import forks
from tests.plugins.environments.conftest import Played
from tests.plugins.harbor.suites import write_task
from tests.sandboxes.conftest import allows_sandbox  # noqa: F401  the fixture

pytestmark = pytest.mark.usefixtures("allows_sandbox")

TEXT = {"reply": "command"}
JSON_TESTS = "#!/bin/sh\necho '%s' > /logs/verifier/reward.json\n"


def spec_of(folder: Path, changes: dict[str, str | None] | None = None) -> str:
    return f"harbor:{write_task(folder / 'one', changes)}"


def test_commands_are_answers(played: Played, tmp_path: Path) -> None:
    """What a command leaves is there for the next one; the line exit ends the episode and is not run."""
    said = ["echo he > a; ls", "cat nothing", '```bash\necho "$(cat a)llo" > hello.txt\nexit\n```']
    result, model = played(spec_of(tmp_path), TEXT, said)
    assert result == {
        "reward": 1.0,
        "commands": 3.0,
        "commands_failed": 1.0,
        "tests_without_reward": 0.0,
    }
    first, second, third = (body["messages"] for body in model.requests)
    assert first == [
        {"role": "user", "content": f"Write the word hello into hello.txt.\n\n{ASKED}"}
    ]
    assert second[-1] == {"role": "user", "content": "a\nbuilt.txt\ndata.txt\n"}
    assert third[-1]["content"].endswith("No such file or directory\n\n[exit code 1]")
    assert "tools" not in model.requests[0]


def test_commands_are_calls(played: Played, tmp_path: Path) -> None:
    """An answer without a call ends the episode; a call without a command is told so."""
    said = [("shell", {"command": "echo hello > hello.txt"}), ("shell", {}), "It is there."]
    result, model = played(spec_of(tmp_path), {}, said)
    assert result["reward"] == 1.0 and result["commands"] == 1.0
    assert model.requests[0]["messages"] == [
        {"role": "user", "content": "Write the word hello into hello.txt."}
    ]
    assert model.requests[0]["tools"][0]["function"]["name"] == "shell"
    outputs = [one["content"] for one in model.requests[-1]["messages"] if one["role"] == "tool"]
    assert outputs == [
        "",
        "Error: the arguments are not a JSON object with the text `command` alone",
    ]


def test_neither_tests_nor_solution_are_seen(played: Played, tmp_path: Path) -> None:
    _, model = played(spec_of(tmp_path), TEXT, ["ls -d /tests /solution /logs/verifier", "exit"])
    shown = model.requests[-1]["messages"][-1]["content"]
    assert shown.count("No such file or directory") == 3


def test_a_planted_reward_does_not_count(played: Played, tmp_path: Path) -> None:
    planted = "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo > /tests/wanted.txt"
    result, _ = played(spec_of(tmp_path), TEXT, [planted, "exit"])
    assert result["reward"] == 0.0 and result["tests_without_reward"] == 0.0


@pytest.mark.parametrize(
    ("tests", "reward", "missing"),
    [
        (JSON_TESTS % '{"reward": 0.5, "style": 1}', 0.5, 0.0),
        (JSON_TESTS % '{"score": 0.25}', 0.25, 0.0),
        (JSON_TESTS % '{"score": 1, "style": 1}', 0.0, 1.0),
        (JSON_TESTS % "1 or 2", 0.0, 1.0),
        ("#!/bin/sh\nexit 3\n", 0.0, 1.0),
    ],
)
def test_what_the_tests_write(
    tests: str, reward: float, missing: float, played: Played, tmp_path: Path
) -> None:
    result, _ = played(spec_of(tmp_path, {"tests/test.sh": tests}), TEXT, ["exit"])
    assert (result["reward"], result["tests_without_reward"]) == (reward, missing)
    assert ("unjudged" in result) == bool(missing)
    assert result.get("style", 1.0) == 1.0


def test_times_of_the_task(played: Played, tmp_path: Path) -> None:
    """A command gets what the model's phase has left, and then it is over; tests without an end give no reward."""
    short = "[agent]\ntimeout_sec = 0.3\n[verifier]\ntimeout_sec = 0.3\n"
    changes = {"task.toml": short, "tests/test.sh": "#!/bin/sh\nsleep 60\n"}
    result, model = played(spec_of(tmp_path, changes), TEXT, ["echo a; sleep 60"])
    assert len(model.requests) == 1 and result["tests_without_reward"] == 1.0


@pytest.mark.parametrize(
    "end",
    ["rm -r /logs; touch /logs", "head -c 100M /dev/zero > /fill"],
)
def test_a_sandbox_that_is_spoilt_is_worth_nothing(
    end: str, played: Played, tmp_path: Path
) -> None:
    """It must not be better to break the sandbox than to fail, and there is no reward without tests."""
    small = {"task.toml": "[environment]\nstorage_mb = 1\n"}
    said = ["echo hello > hello.txt", end, "exit"]
    result, _ = played(spec_of(tmp_path, small), TEXT, said)
    assert (result["reward"], result["tests_without_reward"]) == (0.0, 1.0)


def test_rows_are_tasks_and_those_of_another_folder_are_held_out(tmp_path: Path) -> None:
    for name in ("train/b", "train/a", "eval/c"):
        write_task(tmp_path / name)
    agent = adapter(f"harbor:{tmp_path / 'train'}", {"eval": str(tmp_path / "eval")})
    tasks = [row["env_row"]["task"] for row in agent.rows("train", None)]
    assert tasks == [str(tmp_path / "train" / name) for name in "ab"]
    assert [row["env_row"]["task"] for row in agent.rows("eval", None)] == [
        str(tmp_path / "eval" / "c")
    ]
    alone = adapter(f"harbor:{tmp_path / 'train'}", {})
    with pytest.raises(UsageError, match="holds no tasks out: name a folder of others"):
        list(alone.rows("eval", None))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"evall": "x"}, "evall: Extra inputs are not permitted"),
        ({"reply": "yes"}, "reply: Input should be 'command'"),
        ({"provider": "moon"}, "provider: Input should be 'local', 'docker'"),
        ({"proxy": "moon"}, "proxy: Value error, a sandbox's network is HOST:PORT"),
    ],
)
def test_arguments_that_are_wrong(args: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--env_args of harbor: {said}"):
        adapter(spec_of(tmp_path), args).prepare()


def test_check_proves_each_task(tmp_path: Path) -> None:
    """Right ones, and each way to be wrong: a line says which."""
    yes = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
    write_task(tmp_path / "right")
    write_task(tmp_path / "without", {"solution/solve.sh": None})
    write_task(tmp_path / "fails", {"solution/solve.sh": "#!/bin/sh\necho I cannot\nexit 4\n"})
    write_task(tmp_path / "gift", {"tests/test.sh": yes})
    write_task(tmp_path / "silent", {"tests/test.sh": "#!/bin/sh\necho broken\nexit 2\n"})
    write_task(tmp_path / "unbuilt", {"environment/Dockerfile": "FROM host\nRUN no_such_program\n"})
    write_task(tmp_path / "unread", {"task.toml": "["})
    words = ["check", "--env", f"harbor:{tmp_path}", "--env_args", json.dumps(TEXT), "--json"]
    done = forks.run(["-m", "swift_r1", *words], timeout=120)
    report = json.loads(done.stdout)
    proofs = {one["task"]: (one["oracle"], one["empty"]) for one in report["environment"]["proofs"]}
    assert done.returncode == 2 and proofs == {
        "fails": (0.0, 0.0),
        "gift": (1.0, 1.0),
        "right": (1.0, 0.0),
        "silent": (None, None),
        "unbuilt": (None, None),
        "unread": (None, None),
        "without": (None, 0.0),
    }
    lines = {
        Path(fault.partition(":")[0]).relative_to(tmp_path).parts[0]: fault
        for fault in report["faults"]
    }
    assert sorted(lines) == ["fails", "gift", "silent", "unbuilt", "unread"]
    for name, said in {
        "fails": "its own solution gets reward 0; solve.sh ended with code 4: I cannot",
        "gift": "it passes without a solution, with reward 1",
        "silent": "the tests wrote no /logs/verifier/reward.txt, and ended with code 2: broken",
        "unbuilt": "environment/Dockerfile:2: RUN ended with code 127",
        "unread": "task.toml: Invalid",
    }.items():
        assert said in lines[name], lines[name]
