"""Environments of TRL: a script as it is, and a class alone. With TRL installed (`make test-agents`) and without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from swift_r1.data.loading import load_dataset
from swift_r1.errors import UsageError
from swift_r1.plugins.environments.base import adapter
from swift_r1.plugins.environments.process import read_rows
from swift_r1.plugins.environments.registering import register_environment
from tests.plugins.environments.conftest import FILES, Played

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
    assert second["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "c1",
        "name": "add",
        "content": "1",
    }
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
    # max_tool_calling_iterations=2
    assert len(model.requests) == 3 and result["tool_calls_failed"] == 2.0


@pytest.mark.long
def test_its_rows_are_the_data_set_env() -> None:
    register_environment(SCRIPT, {"argv": ["--most", 5]})
    rows, _ = load_dataset("env")
    assert [row["env_row"]["wanted"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[4]["messages"] == [{"role": "user", "content": "Make it show 5."}]
    assert len(load_dataset("env#7")[0]) == 7


DRAWN = """
import random
import numpy as np
from trl import GRPOTrainer
class Env:
    def reset(self, **row):
        return ""
words = sorted(random.choices("abcdefgh", k=8)) + list({"red", "green", "blue"}) + [str(np.random.rand())]
rows = [{"prompt": "-", "words": words}]
GRPOTrainer("m", lambda completions, **_: [0.0], train_dataset=rows, environment_factory=Env)
"""


def test_rows_that_are_drawn_are_the_same_in_each_process(tmp_path: Path) -> None:
    """Else a run that is resumed would have others."""
    spec = write(tmp_path, DRAWN)
    first, again = (list(read_rows(spec, {}, [], "train", None)) for _ in "12")
    assert first == again


def test_episodes_of_a_row_begin_alike() -> None:
    from swift_r1.plugins.environments.base import seed_generators

    drawn = set()
    for _ in range(3):
        seed_generators("env:0")
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


ROWS_AND_REWARDS = """
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.grpo_config import GRPOConfig
class Env:
    def reset(self, **row):
        return row["said"]
def first(environment, said, **kwargs):
    return [1.0 if (environment, said) == (["env"], ["held"]) else float("nan")]
def second(completions, **kwargs):
    return [0.5]
rows = {"train": [{"environment": "env", "said": "trained"}], "eval": [{"environment": "env", "said": "held"}]}
GRPOTrainer(model="m", args=GRPOConfig(bf16=True), reward_funcs=[first, second], environment_factory={"env": Env},
            train_dataset=(row for row in rows["train"] * 9), eval_dataset=EVAL)
"""


def test_held_out_rows_and_columns_of_rewards(played: Played, tmp_path: Path) -> None:
    """Imported from where TRL defines them. NaN is no opinion."""
    spec = write(tmp_path, ROWS_AND_REWARDS.replace("EVAL", "rows['eval']"))
    [held] = adapter(spec, {}).rows("eval", None)
    assert held["env_row"]["said"] == "held"
    for row, parts in ((held, (1.5, 1.0)), (next(adapter(spec, {}).rows("train", 1)), (0.5, None))):
        result, _ = played(spec, {}, ["x"], row)
        assert (result["reward"], result["first"]) == parts
    with pytest.raises(UsageError, match="has no length: say how many rows, --dataset env#N"):
        list(adapter(spec, {}).rows("train", None))
    assert len(list(adapter(spec, {}).rows("train", 4))) == 4
    spec = write(
        tmp_path, ROWS_AND_REWARDS.replace("EVAL", "{'a': rows['eval'], 'b': rows['train']}")
    )
    assert [row["env_row"]["said"] for row in adapter(spec, {}).rows("eval", None)] == [
        "held",
        "trained",
    ]
    spec = write(tmp_path, ROWS_AND_REWARDS.replace("EVAL", "None"))
    with pytest.raises(
        UsageError, match="no eval_dataset: give --split_dataset_ratio or --val_dataset"
    ):
        list(adapter(spec, {}).rows("eval", None))


PARSED = """
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser
class Env:
    def reset(self, **row): ...
    def get_reward(self):
        return 2.0
script, config, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
GRPOTrainer(model.model_name_or_path, args=config, train_dataset=[{"prompt": "p"}] * 2, environment_factory=Env)
"""


def test_a_command_line_that_trls_parser_reads(played: Played, tmp_path: Path) -> None:
    args = {
        "argv": [
            "--model_name_or_path",
            "m",
            "--dataset_name",
            "d",
            "--max_tool_calling_iterations",
            3,
            "--bf16",
            "true",
        ]
    }
    spec = write(tmp_path, PARSED)
    if importlib.util.find_spec("trl") is None:
        with pytest.raises(
            UsageError,
            match=r"TRL is not installed: if it is needed, pip install 'swift-r1\[trl\]'",
        ):
            adapter(spec, args).prepare()
        return
    agent = adapter(spec, args)
    assert agent.loaded().most_calls == 3  # type: ignore[attr-defined]
    assert played(spec, args, ["x"])[0]["reward"] == 2.0


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
    rows = list(adapter(spec, {}).rows("train", None))
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
    with pytest.raises(
        UsageError, match=r"no environment class Env \(a class with reset\); there are CounterEnv"
    ):
        adapter(f"{SCRIPT}:Env", {}).loaded()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="makes a trainer where it is imported: name no class"):
        adapter(f"{write(tmp_path, TOOLS_OF_TWO)}:Left", {}).loaded()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="unknown most; there is argv, its command line"):
        adapter(SCRIPT, {"most": 2}).loaded()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="No module named 'nowhere'"):
        adapter("trl:nowhere:Env", {}).loaded()  # type: ignore[attr-defined]
