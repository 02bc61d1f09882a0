"""Environments of Gymnasium as text. They need it (`make test-agents`)."""

from __future__ import annotations

from typing import Any

import pytest

from swift_r1.errors import UsageError
from swift_r1.plugins.environments.base import adapter
from swift_r1.plugins.environments.gymnasium import _action
from tests.plugins.environments.conftest import Played

gymnasium = pytest.importorskip("gymnasium", reason="needs the extra gymnasium")

LAKE, STILL = "gymnasium:FrozenLake-v1", {"is_slippery": False}
TO_GOAL = ["1", "1", "2", "I go 1.", "Move right", "2 (Move right)"]


def test_the_way_to_the_goal(played: Played) -> None:
    result, model = played(LAKE, STILL, TO_GOAL)
    assert result == {
        "reward": 1.0,
        "turn_rewards": [0.0] * 5 + [1.0],
        "steps": 6.0,
        "invalid_actions": 0.0,
        "terminated": 1.0,
        "truncated": 0.0,
    }
    first = model.requests[0]["messages"][-1]["content"]
    assert first.endswith(
        "0 (Move left), 1 (Move down), 2 (Move right), 3 (Move up).\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    )
    assert model.requests[1]["messages"][-1]["content"] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert "tools" not in model.requests[0]


def test_no_action_takes_a_turn_and_no_step(played: Played) -> None:
    result, model = played(LAKE, STILL | {"max_episode_steps": 3}, ["well", "7", "1"])
    assert (result["invalid_actions"], result["steps"], result["truncated"]) == (2.0, 1.0, 1.0)
    assert len(result["turn_rewards"]) == 3 == len(model.requests)
    assert model.requests[1]["messages"][-1]["content"].startswith(
        "That is no action. Answer with the number"
    )


def test_rows_are_seeds_and_held_out_ones_are_others() -> None:
    agent = adapter("gymnasium:Blackjack-v1", {})
    train, held_out = list(agent.rows("train", 3)), list(agent.rows("eval", 3))
    assert [row["env_row"]["seed"] for row in train] == [0, 1, 2]
    assert not {row["env_row"]["seed"] for row in held_out} & {0, 1, 2}
    text = train[0]["messages"][0]["content"]
    assert "The observation consists of a 3-tuple" in text and text.endswith("0 (Stick), 1 (Hit).")


def test_the_same_seed_deals_the_same_cards(played: Played) -> None:
    row = {"messages": [{"role": "user", "content": "Play."}], "seed": 5}
    firsts = {
        played("gymnasium:Blackjack-v1", {}, ["stick"], row)[1].requests[0]["messages"][0][
            "content"
        ]
        for _ in "12"
    }
    assert len(firsts) == 1 and firsts.pop().startswith("Play.\n\n[")


def test_a_users_row_without_a_seed_begins_alike(played: Played) -> None:
    row = {"messages": [{"role": "user", "content": "Play."}]}
    begun = {
        played("gymnasium:Begins-v0", {}, ["0"], row)[1].requests[0]["messages"][0]["content"]
        for _ in "123"
    }
    assert len(begun) == 1


class Begins(gymnasium.Env):  # type: ignore[misc,name-defined]
    """A number, by the seed."""

    action_space, observation_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Text(99)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return str(self.np_random.integers(2**40)), {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 1.0, True, False, {}


class Broken(Begins):
    def __init__(self) -> None:
        raise OSError("the board is gone")


gymnasium.register("Begins-v0", Begins)
gymnasium.register("Broken-v0", Broken)


class Parrot(gymnasium.Env):  # type: ignore[misc,name-defined]
    """Words in, words out."""

    action_space = observation_space = gymnasium.spaces.Text(99)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return "Say hello.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"{action}!", float(action == "hello"), action == "hello", False, {}


gymnasium.register("Parrot-v0", Parrot)


def test_an_environment_of_words(played: Played) -> None:
    result, model = played("gymnasium:Parrot-v0", {}, ["hi", " hello\n"])
    assert result["reward"] == 1.0 and result["steps"] == 2.0
    assert model.requests[0]["messages"][0]["content"].endswith(
        "next command and nothing else.\n\nSay hello."
    )
    assert model.requests[1]["messages"][-1]["content"] == "hi!"


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("FrozenLak-v1", {}, "doesn't exist. Did you mean: `FrozenLake`"),
        ("FrozenLake-v1", {"slippery": False}, "unexpected keyword argument 'slippery'"),
        ("FrozenLake-v1", {"actions": ["a"]}, "has 1 actions, the environment 4"),
        ("Pendulum-v1", {}, "its actions are Box.*which nobody writes"),
        ("no_such_module:X-v0", {}, "No module named 'no_such_module'"),
        ("Broken-v0", {}, r"OSError: the board is gone \(.*test_gymnasium.py"),
    ],
)
def test_environments_that_cannot_be_played(name: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        list(adapter(f"gymnasium:{name}", args).rows("train", 1))


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("3", 3),
        ("I think 1, no: 2.", 2),
        ("Move UP and then move down", 1),
        ("4", None),
        ("v1.0", None),
        ("", None),
        ("12", None),
        ("9" * 5000, None),
    ],
)
def test_the_action_of_a_reply(reply: str, action: int | None) -> None:
    assert _action(reply, ["move left", "move down", "move right", "move up"]) == action
