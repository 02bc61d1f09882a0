"""Environments of TRL: a script as it is, and a class alone. With TRL installed (`make test-agents`) and without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_r1.data.loading import load_dataset
from swift_r1.environments.base import adapter
from swift_r1.environments.registering import register_environment
from swift_r1.errors import UsageError
from tests.environments.conftest import FILES, Played

SCRIPT = f"trl:{FILES / 'counter_script.py'}"


def test_an_episode_of_a_script(played: Played) -> None:
    result, model = played(SCRIPT, {}, [("add", {"amount": 1}), "done"])
    first, second = model.requests
    assert first["messages"] == [{"role": "user", "content": "Make it show 1. It shows 0."}]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add", "look"]
    assert first["tools"][0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"amount": {"type": "integer", "description": "what to add, above 0"}},
        "required": ["amount"],
    }
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "1"}
    assert result == {
        "reward": 0.5 / 3 + 1.0,
        "brief": 1 / 3,
        "no_opinion": None,
        "CounterEnv": 1.0,
        "tool_calls_made": 1.0,
        "tool_calls_failed": 0.0,
    }


def test_what_tools_raise_is_told_and_calls_are_limited(played: Played) -> None:
    wrong = [("add", {"amount": -1}), ("jump", {}), ("look", {}), "not asked any more"]
    result, model = played(SCRIPT, {}, wrong)
    told = [message["content"] for message in model.messages if message["role"] == "tool"]
    assert told == ["Error: only forwards", "Error: Tool jump not found."]
    assert len(model.requests) == 3 and result["tool_calls_failed"] == 2.0  # max_tool_calling_iterations=2


def test_its_rows_are_the_data_set_env() -> None:
    register_environment(SCRIPT, {"argv": ["--most", 5]})
    rows, _ = load_dataset("env")
    assert [row["env_row"]["wanted"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[4]["messages"] == [{"role": "user", "content": "Make it show 5."}]
    assert len(load_dataset("env#7")[0]) == 7


def test_episodes_of_a_row_begin_alike() -> None:
    from swift_r1.environments.base import seed_episode

    drawn = set()
    for _ in range(3):
        seed_episode("env:0")
        [factory] = adapter(SCRIPT, {}).loaded().factories.values()  # type: ignore[attr-defined]
        drawn.add(factory().drawn)
    assert len(drawn) == 1


def test_a_class_alone_with_a_users_own_row(played: Played) -> None:
    row = {"messages": [{"role": "user", "content": "To 2!"}], "wanted": 2}
    result, model = played(f"{SCRIPT}:CounterEnv", {}, [("add", {"amount": 2}), "done"], row)
    assert model.requests[0]["messages"] == [{"role": "user", "content": "To 2! It shows 0."}]
    assert result["reward"] == 1.0


def write(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return f"trl:{folder / 'script.py'}"


TOOLS_OF_TWO = '''
from trl import GRPOTrainer
class Left:
    def reset(self, **kwargs):
        assert "environment" not in kwargs
        return "left"
    def go(self) -> str:
        """Goes."""
class Right(Left):
    def stay(self) -> str:
        """Stays."""
rows = [{"environment": "right"}, {"environment": "up"}]
GRPOTrainer(model="m", reward_funcs=lambda completions, **_: [3.0], train_dataset=rows,
            environment_factory={"left": Left, "right": Right})
'''


def test_a_row_says_which_environment(played: Played, tmp_path: Path) -> None:
    spec = write(tmp_path, TOOLS_OF_TWO)
    rows = list(adapter(spec, {}).rows("train", None, 0))
    result, model = played(spec, {}, ["x"], rows[0])
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["go", "stay"]
    assert result["reward"] == 3.0 and model.requests[0]["messages"][0]["content"] == "left"
    with pytest.raises(UsageError, match=r"a row has the environment 'up'; there are left, right"):
        played(spec, {}, [], rows[1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "the script ended without making a GRPOTrainer"),
        ("raise OSError('no disk')", r"OSError: no disk \(.*script.py:1\)"),
        ("import sys; sys.exit('usage')", "SystemExit: usage"),
        ("from trl import GRPOTrainer; GRPOTrainer('m')", "its trainer has no environment_factory"),
        (
            "from trl import GRPOTrainer; GRPOTrainer('m', reward_funcs='org/model', environment_factory=dict)",
            "its reward 'org/model' is a model: give it to --reward_model",
        ),
    ],
)
def test_scripts_that_cannot_be_played(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        adapter(write(tmp_path, text), {}).loaded()  # type: ignore[attr-defined]


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file nowhere\.py"):
        adapter("trl:nowhere.py", {}).loaded()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"no environment class Env \(a class with reset\); there are CounterEnv"):
        adapter(f"{SCRIPT}:Env", {}).loaded()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="makes a trainer where it is imported: name no class"):
        adapter(f"{write(tmp_path, TOOLS_OF_TWO)}:Left", {}).loaded()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="No module named 'nowhere'"):
        adapter("trl:nowhere:Env", {}).loaded()  # type: ignore[attr-defined]
